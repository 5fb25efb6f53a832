// SPDX-License-Identifier: Apache-2.0
//! Moments and masters in fewer bytes: formats, remainders, their state tensors, conversion and refusals.
mod support;
use dsopt::{
    Adagrad, Adam, AdamLegacy, AdamW, Array, Context, Dtype, Element, ErrorKind, Group, Lamb, Lion, LoadOptions,
    Moment, OneBitAdam, Optimizer, OptimizerBuilder, Param, Reset, Result, Sgd, Step, TensorMut, TensorRef, BF16, F16,
    F8E4M3,
};
use std::io::Cursor;
use support::Random;

const SIZES: [usize; 2] = [7, 700]; // 1 and 3 blocks of 256

/// Weights of two parameters, identical in each object.
fn start() -> Vec<Vec<BF16>> {
    let mut random = Random(12345);
    SIZES.iter().map(|&size| random.vec(size).into_iter().map(BF16::from_f32).collect()).collect()
}

fn params() -> Vec<Param> {
    vec![Param::new("a", Dtype::BF16, SIZES[0]), Param::shaped("b", Dtype::BF16, &[7, 100])]
}

fn rule(exp_avg_format: Moment, exp_avg_sq_format: Moment) -> AdamW {
    AdamW { lr: 0.01, weight_decay: 0.1, exp_avg_format, exp_avg_sq_format, ..Default::default() }
}

const PLAIN: (Moment, Moment) = (Moment::F32, Moment::F32);
/// The recommended formats, together with remainders.
const LOW: (Moment, Moment) = (Moment::E4m3, Moment::Bf16Random);

fn optimizer(builder: OptimizerBuilder, formats: (Moment, Moment)) -> Optimizer {
    let mut opt = builder.build().unwrap();
    opt.add_group(&rule(formats.0, formats.1), &params()).unwrap();
    opt
}

fn low_precision(ctx: &Context, seed: u64) -> Optimizer {
    optimizer(Optimizer::builder(ctx).remainder_masters().seed(seed), LOW)
}

fn muts<T: Element>(lists: &mut [Vec<T>]) -> Vec<TensorMut<'_>> {
    lists.iter_mut().map(TensorMut::from).collect()
}

fn refs<T: Element>(lists: &[Vec<T>]) -> Vec<TensorRef<'_>> {
    lists.iter().map(TensorRef::from).collect()
}

fn gradients(step: u32) -> Vec<Vec<f32>> {
    let mut random = Random(1000 + step);
    SIZES.iter().map(|&size| random.vec(size)).collect()
}

fn train(opt: &mut Optimizer, weights: &mut [Vec<BF16>], steps: std::ops::Range<u32>) {
    for step in steps {
        opt.step(&mut muts(weights), &refs(&gradients(step))).unwrap();
    }
}

fn find(opt: &Optimizer, name: &str, param: usize) -> usize {
    opt.find_state(name, Some(param)).unwrap().unwrap_or_else(|| panic!("no {name} of parameter {param}"))
}

fn stored<T: Element>(opt: &mut Optimizer, name: &str, param: usize) -> Vec<T> {
    let index = find(opt, name, param);
    let mut values = vec![T::default(); opt.state_info(index).unwrap().numel];
    opt.export(index, &mut values).unwrap();
    values
}

fn as_f32(opt: &mut Optimizer, name: &str, param: usize, weights: &[Vec<BF16>]) -> Vec<f32> {
    let index = find(opt, name, param);
    let mut values = vec![0.0; opt.state_info(index).unwrap().numel];
    opt.export_f32(index, &mut values, &refs(weights)).unwrap();
    values
}

/// Root of the mean squared difference, relative to that of `exact`.
fn difference(values: &[f32], exact: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let error: f64 = values.iter().zip(exact).map(|(&v, &e)| square(f64::from(v) - f64::from(e))).sum();
    (error / exact.iter().map(|&e| square(f64::from(e))).sum::<f64>()).sqrt()
}

#[track_caller]
fn refused<T>(result: Result<T>, kind: ErrorKind, text: &str) {
    let error = result.err().expect("an error");
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.text().contains(text), "{error}");
}

#[test]
fn export_f32_decodes_what_is_stored() {
    let ctx = Context::cpu().unwrap();
    let (mut opt, mut w) = (low_precision(&ctx, 7), start());
    train(&mut opt, &mut w, 0..20);
    let codes: Vec<F8E4M3> = stored(&mut opt, "exp_avg", 1);
    let scales: Vec<f32> = stored(&mut opt, "exp_avg_scale", 1);
    for (i, (value, code)) in as_f32(&mut opt, "exp_avg", 1, &w).iter().zip(codes).enumerate() {
        assert_eq!(*value, code.to_f32() * scales[i / 256], "element {i}");
    }
    let squares: Vec<BF16> = stored(&mut opt, "exp_avg_sq", 1);
    let exact: Vec<f32> = squares.iter().map(|square| square.to_f32()).collect();
    assert_eq!(as_f32(&mut opt, "exp_avg_sq", 1, &w), exact);
    assert_eq!(as_f32(&mut opt, "exp_avg_scale", 1, &w), scales, "f32 entries as they are");
    assert!(F8E4M3(0x7f).to_f32().is_nan());
    assert_eq!([F8E4M3(1), F8E4M3(0xb8), F8E4M3(0x7e)].map(F8E4M3::to_f32), [1.0 / 512.0, -1.0, 448.0]);
}

#[test]
fn import_f32_restores_moments_and_masters() {
    let ctx = Context::cpu().unwrap();
    let (mut first, mut second) = (low_precision(&ctx, 7), low_precision(&ctx, 7));
    let (mut w, mut v) = (start(), start());
    train(&mut first, &mut w, 0..5);
    for name in ["remainder", "exp_avg", "exp_avg_sq"] {
        for p in 0..2 {
            let values = as_f32(&mut first, name, p, &w);
            second.import_f32(find(&second, name, p), &values, &mut muts(&mut v)).unwrap();
        }
    }
    assert_eq!(v, w, "a remainder sets its parameter");
    let steps = first.find_state("step", None).unwrap().unwrap();
    let mut counters = [0i32; 2];
    first.export(steps, &mut counters).unwrap();
    second.import(steps, &counters).unwrap();
    train(&mut first, &mut w, 5..8);
    train(&mut second, &mut v, 5..8);
    assert_eq!(v, w);
    for name in ["remainder", "exp_avg", "exp_avg_sq"] {
        assert_eq!(as_f32(&mut second, name, 1, &v), as_f32(&mut first, name, 1, &w), "{name}");
    }
}

#[test]
fn state_list_has_dtypes_blocks_and_dims() {
    let ctx = Context::cpu().unwrap();
    let opt = low_precision(&ctx, 7);
    let list = opt.state().unwrap();
    let found: Vec<_> =
        list[4..].iter().map(|entry| (entry.name, entry.dtype, entry.block, entry.dims.as_slice())).collect();
    let expected: [(&str, Dtype, usize, &[usize]); 5] = [
        ("remainder", Dtype::I16, 1, &[7, 100]),
        ("exp_avg", Dtype::F8E4M3, 1, &[7, 100]),
        ("exp_avg_scale", Dtype::F32, 256, &[3]),
        ("exp_avg_sq", Dtype::BF16, 1, &[7, 100]),
        ("step", Dtype::I32, 0, &[2]),
    ];
    assert_eq!(found, expected);

    let opt = optimizer(Optimizer::builder(&ctx), (Moment::Q8, Moment::Q8));
    assert_eq!(opt.state_info(find(&opt, "exp_avg", 0)).unwrap().dtype, Dtype::U8);
    assert_eq!(opt.state_info(find(&opt, "exp_avg_sq_scale", 0)).unwrap().block, 256);
}

#[test]
fn views_have_the_elements_of_each_dtype() {
    let ctx = Context::cpu().unwrap();
    let mut opt = Optimizer::builder(&ctx).remainder_masters().build().unwrap();
    opt.add_group(&rule(Moment::E4m3, Moment::Q8), &params()).unwrap();
    let mut w = start();
    opt.init(&mut muts(&mut w)).unwrap();
    let view = |name| format!("{:?}", opt.view(find(&opt, name, 0)).unwrap().unwrap());
    assert_eq!(view("remainder"), "I16([0, 0, 0, 0, 0, 0, 0])");
    assert!(view("exp_avg").starts_with("F8E4M3([F8E4M3(0), "));
    assert_eq!(view("exp_avg_sq"), "U8([0, 0, 0, 0, 0, 0, 0])");
    assert_eq!(view("exp_avg_sq_scale"), "F32([0.0])");
}

#[test]
fn f32_moments_keeps_moments_of_a_parameter() {
    let ctx = Context::cpu().unwrap();
    let mut opt = Optimizer::new(&ctx).unwrap();
    let list = [Param::new("a", Dtype::F32, 3).f32_moments(), Param::new("b", Dtype::F32, 3)];
    opt.add_group(&rule(LOW.0, LOW.1), &list).unwrap();
    let dtype = |name, param| opt.state_info(find(&opt, name, param)).unwrap().dtype;
    assert_eq!([dtype("exp_avg", 0), dtype("exp_avg_sq", 0)], [Dtype::F32; 2]);
    assert_eq!([dtype("exp_avg", 1), dtype("exp_avg_sq", 1)], [Dtype::F8E4M3, Dtype::BF16]);
    assert_eq!(opt.find_state("exp_avg_scale", Some(0)).unwrap(), None);
}

#[test]
fn seed_determines_random_rounding() {
    let ctx = Context::cpu().unwrap();
    let squares = |seed| {
        let (mut opt, mut w) = (low_precision(&ctx, seed), start());
        train(&mut opt, &mut w, 0..3);
        stored::<BF16>(&mut opt, "exp_avg_sq", 1)
    };
    assert_eq!(squares(7), squares(7));
    assert_ne!(squares(7), squares(8));
}

#[test]
fn apply_gives_same_bits_as_step() {
    let ctx = Context::cpu().unwrap();
    let mut opt = low_precision(&ctx, 7);
    let (mut stepped, mut applied) = (start(), start());
    let mut state = opt.new_state(&mut muts(&mut applied)).unwrap();
    let mut workspace = Vec::new();
    for step in 0..3 {
        // The output and the new remainder are the new master; the parameters are only read.
        let (grads, mut out) = (gradients(step), applied.clone());
        let mut list: Vec<_> = state.iter_mut().map(Array::as_tensor_mut).collect();
        let (params, grads) = (refs(&applied), refs(&grads));
        opt.apply(Step::out_only(&params, &grads, &mut muts(&mut out)), &mut list, &mut workspace).unwrap();
        applied = out;
    }
    train(&mut opt, &mut stepped, 0..3);
    assert_eq!(applied, stepped);
    assert_eq!(state[4], Array::I16(stored(&mut opt, "remainder", 1)));
    assert_eq!(state[5], Array::F8E4M3(stored(&mut opt, "exp_avg", 1)));
    assert_eq!(state[6], Array::F32(stored(&mut opt, "exp_avg_scale", 1)));
    assert_eq!(state[7], Array::BF16(stored(&mut opt, "exp_avg_sq", 1)));
}

#[test]
fn every_algorithm_trains_with_its_formats() {
    let ctx = Context::cpu().unwrap();
    let groups: [(&dyn Group, &str, Dtype); 6] = [
        (&Adam { exp_avg_format: Moment::Bf16, ..Default::default() }, "exp_avg", Dtype::BF16),
        (&AdamLegacy { exp_avg_sq_format: Moment::Bf16Random, ..Default::default() }, "exp_avg_sq", Dtype::BF16),
        (&Lamb { exp_avg_sq_format: Moment::Q8, ..Default::default() }, "exp_avg_sq", Dtype::U8),
        (
            &Sgd { lr: 0.1, momentum: 0.9, exp_avg_format: Moment::E4m3, ..Default::default() },
            "momentum_buffer",
            Dtype::F8E4M3,
        ),
        (&Lion { exp_avg_format: Moment::Q8, ..Default::default() }, "exp_avg", Dtype::U8),
        (&Adagrad { exp_avg_sq_format: Moment::Bf16Random, ..Default::default() }, "sum", Dtype::BF16),
    ];
    for (group, moment, dtype) in groups {
        let mut opt = Optimizer::builder(&ctx).remainder_masters().build().unwrap();
        opt.add_group(group, &params()).unwrap();
        assert_eq!(opt.state_info(find(&opt, moment, 1)).unwrap().dtype, dtype, "{moment}");
        let mut w = start();
        train(&mut opt, &mut w, 0..2);
        assert_ne!(w[1], start()[1], "{moment}");
    }
}

#[test]
fn load_converts_moments_only_if_asked() {
    let ctx = Context::cpu().unwrap();
    let (mut exact, mut low) = (optimizer(Optimizer::builder(&ctx), PLAIN), low_precision(&ctx, 7));
    let (mut w, mut v) = (start(), start());
    train(&mut exact, &mut w, 0..5);
    let mut file = Vec::new();
    exact.save_to(&mut file, &[]).unwrap(); // without parameters
    let readers = &mut [Cursor::new(&file)];
    let plain = LoadOptions { keep_params: true, ..Default::default() };
    refused(low.load_from(readers, plain, &mut muts(&mut v)), ErrorKind::Mismatch, "a.exp_avg");
    assert_eq!(v, start());
    let options = LoadOptions { convert: true, ..plain };
    refused(low.load_from(readers, options, &mut []), ErrorKind::State, "'a' has no memory");
    low.load_from(readers, options, &mut muts(&mut v)).unwrap();
    assert_eq!(as_f32(&mut low, "remainder", 1, &v), as_f32(&mut exact, "master", 1, &w), "masters are exact");
    let (moment, saved) = (as_f32(&mut low, "exp_avg", 1, &v), as_f32(&mut exact, "exp_avg", 1, &w));
    assert!(difference(&moment, &saved) < 0.05);
    assert_ne!(moment, saved);
    let all = LoadOptions { convert: true, ..Default::default() };
    refused(low.load_from(readers, all, &mut muts(&mut v)), ErrorKind::Mismatch, "a.param");

    // And back: fp32 holds every level.
    let mut file = Vec::new();
    refused(low.save_to(Vec::new(), &[]), ErrorKind::State, "'a' has no memory");
    low.save_to(&mut file, &refs(&v)).unwrap();
    exact.load_from(&mut [Cursor::new(&file)], options, &mut []).unwrap();
    assert_eq!(as_f32(&mut exact, "exp_avg", 1, &w), moment);
    assert_eq!(as_f32(&mut exact, "master", 1, &w), as_f32(&mut low, "remainder", 1, &v));
}

#[test]
fn reset_masters_clears_remainders_without_parameters() {
    let ctx = Context::cpu().unwrap();
    let (mut opt, mut w) = (low_precision(&ctx, 7), start());
    train(&mut opt, &mut w, 0..3);
    assert_ne!(stored::<i16>(&mut opt, "remainder", 1), [0; SIZES[1]]);
    opt.reset(&[Reset::Masters], &[]).unwrap();
    assert_eq!(stored::<i16>(&mut opt, "remainder", 1), [0; SIZES[1]]);
    let exact: Vec<f32> = w[1].iter().map(|weight| weight.to_f32()).collect();
    assert_eq!(as_f32(&mut opt, "remainder", 1, &w), exact);
}

#[test]
fn formats_that_cannot_be_are_refused() {
    let ctx = Context::cpu().unwrap();
    let add = |builder: OptimizerBuilder, group: &dyn Group| builder.build()?.add_group(group, &params());
    let new = || Optimizer::builder(&ctx);
    let e4m3 = rule(Moment::E4m3, Moment::F32);
    let unsupported = ErrorKind::Unsupported;
    refused(add(new(), &rule(Moment::F32, Moment::E4m3)), unsupported, "exp_avg_sq_format is E4M3");
    refused(add(new(), &rule(Moment::F32, Moment::Bf16)), unsupported, "exp_avg_sq_format is BF16");
    let adagrad = Adagrad { exp_avg_sq_format: Moment::Q8, ..Default::default() };
    refused(add(new(), &adagrad), unsupported, "exp_avg_sq_format is Q8");
    let sgd = Sgd { exp_avg_format: Moment::E4m3, ..Default::default() };
    refused(add(new(), &sgd), unsupported, "exp_avg_format has no effect in sgd without momentum");
    refused(add(new().flat_masters(), &e4m3), unsupported, "MASTERS_FLAT");
    refused(add(new().deepspeed(), &e4m3), unsupported, "standard mode");
    refused(add(new().remainder_masters(), &OneBitAdam::default()), unsupported, "REMAINDER");
    refused(new().remainder_masters().no_master().build(), unsupported, "NO_MASTER");
    refused(new().remainder_masters().deepspeed().build(), unsupported, "REMAINDER");

    let add = |group: &dyn Group, param: Param| {
        let mut opt = new().remainder_masters().build()?;
        opt.add_group(group, &[param])
    };
    let param = |dtype| Param::new("w", dtype, 300);
    let plain = AdamW::default();
    refused(add(&plain, param(Dtype::F16)), unsupported, "'w' is F16");
    refused(add(&plain, param(Dtype::F32).f32_moments()), unsupported, "F32_MOMENTS of parameter 'w'");
    refused(add(&e4m3, param(Dtype::F32).f32_moments().offset(256)), unsupported, "'w' has offset 256");
    refused(add(&e4m3, param(Dtype::F32).offset(100)), ErrorKind::Argument, "'w' has offset 100");
    add(&e4m3, param(Dtype::F32).offset(256)).unwrap();
    for dtype in [Dtype::I16, Dtype::U8, Dtype::F8E4M3] {
        refused(add(&plain, param(dtype)), ErrorKind::Dtype, "'w'");
    }
}

#[test]
fn calls_refuse_other_dtypes_and_sizes() {
    let ctx = Context::cpu().unwrap();
    let (mut opt, mut w) = (low_precision(&ctx, 7), start());
    train(&mut opt, &mut w, 0..1);
    let exp_avg = find(&opt, "exp_avg", 0);
    refused(opt.export_f32(exp_avg, &mut [0.0; 6], &[]), ErrorKind::Shape, "7 elements, the buffer 6");
    refused(opt.import_f32(exp_avg, &[0.0; 6], &mut []), ErrorKind::Shape, "7 elements, the buffer 6");
    let steps = opt.find_state("step", None).unwrap().unwrap();
    refused(opt.export_f32(steps, &mut [0.0; 2], &[]), ErrorKind::Dtype, "integers");
    refused(opt.export_f32(steps + 1, &mut [0.0; 2], &[]), ErrorKind::Argument, "index");
    let remainder = find(&opt, "remainder", 0);
    refused(opt.export_f32(remainder, &mut [0.0; 7], &[]), ErrorKind::State, "'a' has no memory");
    refused(opt.import_f32(remainder, &[0.0; 7], &mut []), ErrorKind::State, "'a' has no memory");
    opt.export_f32(exp_avg, &mut [0.0; 7], &[]).unwrap(); // needs no parameter

    // The codes of one format are not those of the other one.
    refused(opt.export(exp_avg, &mut [0u8; 7]), ErrorKind::Dtype, "has dtype F8E4M3, the slice U8");
    refused(opt.import(exp_avg, &[0u8; 7]), ErrorKind::Dtype, "has dtype F8E4M3, the slice U8");

    // These dtypes are for state tensors only.
    let (codes, grads) = ([F8E4M3(0); SIZES[0]], gradients(0));
    refused(opt.step(&mut muts(&mut w), &[(&codes).into(), (&grads[1]).into()]), ErrorKind::Dtype, "F8_E4M3");
    let mut wide = gradients(0);
    let (params, grads, out) = (refs(&w), refs(&grads), &mut muts(&mut wide));
    refused(opt.step_with(Step::out_only(&params, &grads, out)), ErrorKind::Dtype, "must be BF16");
    let mut half: Vec<Vec<F16>> = SIZES.iter().map(|&size| vec![F16(0); size]).collect();
    refused(opt.export_f32(remainder, &mut [0.0; 7], &refs(&half)), ErrorKind::Dtype, "F16");
    refused(opt.import_f32(remainder, &[0.0; 7], &mut muts(&mut half)), ErrorKind::Dtype, "F16");
}
