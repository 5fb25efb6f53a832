// SPDX-License-Identifier: Apache-2.0
//! Trains a small network and compares with AdamW in f64, and trains the same in half precision with a loss scale.
mod support;
use dsopt::{
    Adagrad, Adam, AdamW, Array, Context, Dtype, ErrorKind, Group, Hyper, Key, Lion, Moment, Nonfinite, Optimizer,
    Param, Scaler, ScalerOptions, Sgd, Step, StepReport, TensorMut, TensorRef, BF16, F16,
};
use support::Random;

const IN: usize = 3;
const HIDDEN: usize = 8;
const SIZES: [usize; 4] = [IN * HIDDEN, HIDDEN, HIDDEN, 1];

/// Returns the loss of a sample and adds its gradients to `grads`: y = w2 tanh(w1 x + b1) + b2 for the product of the
/// inputs.
fn sample(p: &[Vec<f32>], x: &[f32], scale: f32, grads: &mut [Vec<f32>]) -> f32 {
    let hidden: Vec<f32> =
        (0..HIDDEN).map(|h| (0..IN).map(|i| p[0][h * IN + i] * x[i]).sum::<f32>() + p[1][h]).map(f32::tanh).collect();
    let y: f32 = hidden.iter().zip(&p[2]).map(|(h, w)| h * w).sum::<f32>() + p[3][0];
    let error = y - 4.0 * x[0] * x[1] - x[2];
    for h in 0..HIDDEN {
        let back = scale * error * p[2][h] * (1.0 - hidden[h] * hidden[h]);
        for i in 0..IN {
            grads[0][h * IN + i] += back * x[i];
        }
        grads[1][h] += back;
        grads[2][h] += scale * error * hidden[h];
    }
    grads[3][0] += scale * error;
    0.5 * error * error
}

fn batch(p: &[Vec<f32>], random: &mut Random, scale: f32, grads: &mut [Vec<f32>]) -> f32 {
    const SAMPLES: usize = 16;
    (0..SAMPLES).map(|_| sample(p, &random.vec(IN), scale / SAMPLES as f32, grads)).sum::<f32>() / SAMPLES as f32
}

fn start() -> Vec<Vec<f32>> {
    let mut random = Random(7);
    SIZES.iter().map(|&size| random.vec(size)).collect()
}

fn zeros() -> Vec<Vec<f32>> {
    SIZES.iter().map(|&size| vec![0.0; size]).collect()
}

fn params(dtype: Dtype) -> Vec<Param> {
    vec![
        Param::shaped("w1", dtype, &[HIDDEN, IN]),
        Param::new("b1", dtype, HIDDEN),
        Param::new("w2", dtype, HIDDEN),
        Param::new("b2", dtype, 1),
    ]
}

fn tensors(lists: &mut [Vec<f32>]) -> Vec<TensorMut<'_>> {
    lists.iter_mut().map(TensorMut::from).collect()
}

fn refs(lists: &[Vec<f32>]) -> Vec<TensorRef<'_>> {
    lists.iter().map(TensorRef::from).collect()
}

#[test]
fn step_matches_adamw_in_f64() {
    const GROUP: AdamW = AdamW {
        lr: 0.02,
        beta1: 0.9,
        beta2: 0.99,
        eps: 1e-8,
        weight_decay: 0.01,
        max_norm: 0.0,
        exp_avg_format: Moment::F32,
        exp_avg_sq_format: Moment::F32,
        eps_uncorrected: false,
        bias_correction: true,
    };
    let ctx = Context::builder().threads(2).build().unwrap();
    assert_eq!(ctx.threads(), 2);
    assert!(format!("{ctx:?}").contains("threads: 2"), "{ctx:?}");
    let mut opt = Optimizer::builder(&ctx).max_norm(1.0).build().unwrap();
    opt.add_group(&GROUP, &params(Dtype::F32)).unwrap();
    let mut p = start();
    let mut exact: Vec<Vec<f64>> =
        p.iter().map(|values| values.iter().map(|&value| f64::from(value)).collect()).collect();
    let mut moments: Vec<Vec<(f64, f64)>> = p.iter().map(|values| vec![(0.0, 0.0); values.len()]).collect();
    let mut random = Random(11);
    let (mut first, mut last) = (0.0, 0.0);
    for step in 1..=400 {
        let mut grads = zeros();
        last = batch(&p, &mut random, 1.0, &mut grads);
        first = if step == 1 { last } else { first };

        // The formula of Loshchilov and Hutter on the same gradients.
        let norm = grads.iter().flatten().map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt();
        let divisor = (norm + 1e-6).max(1.0);
        let (c1, c2) = (1.0 - GROUP.beta1.powi(step), 1.0 - GROUP.beta2.powi(step));
        for ((weights, moments), grads) in exact.iter_mut().zip(&mut moments).zip(&grads) {
            for ((w, (m, v)), &g) in weights.iter_mut().zip(moments).zip(grads) {
                let g = f64::from(g) / divisor;
                *m = GROUP.beta1 * *m + (1.0 - GROUP.beta1) * g;
                *v = GROUP.beta2 * *v + (1.0 - GROUP.beta2) * g * g;
                *w -= GROUP.lr * (*m / c1 / ((*v / c2).sqrt() + GROUP.eps) + GROUP.weight_decay * *w);
            }
        }

        let mut report = StepReport::default();
        opt.step_with(Step::new(&mut tensors(&mut p), &refs(&grads)).report(&mut report)).unwrap();
        assert!((f64::from(report.grad_norm().unwrap()) - norm).abs() < 1e-5 * norm.max(1e-3));
        assert!(!report.skipped() && report.reasons().is_empty());
    }
    for (weights, exact) in p.iter().zip(&exact) {
        for (&w, &e) in weights.iter().zip(exact) {
            assert!((f64::from(w) - e).abs() < 1e-4, "{w}, expected {e}");
        }
    }
    assert!(last < first / 4.0, "the loss went from {first} to {last}");

    let report = opt.report().unwrap();
    assert_eq!((report.calls, report.skipped, report.first_bad), (400, 0, None));
    let index = opt.find_state("exp_avg", Some(0)).unwrap().unwrap();
    let info = opt.state_info(index).unwrap();
    assert_eq!((info.name, info.param, info.dims.as_slice()), ("exp_avg", Some(0), &[HIDDEN, IN][..]));
    let view = opt.view(index).unwrap().unwrap().as_f32().unwrap();
    for (&m, (exact, _)) in view.iter().zip(&moments[0]) {
        assert!((f64::from(m) - exact).abs() < 1e-5);
    }
    let steps = opt.find_state("step", None).unwrap().unwrap();
    assert_eq!(opt.view(steps).unwrap().unwrap().as_i32().unwrap(), [400; 4]);
}

/// The same network with 16-bit weights: fp32 masters, and a scale so large that the first gradients overflow.
fn mixed<T: dsopt::Element>(narrow: fn(f32) -> T, widen: fn(T) -> f32, init: f64) -> (f32, f32, i64) {
    let ctx = Context::builder().threads(1).build().unwrap();
    let scaler = Scaler::new(&ctx, ScalerOptions { init, window: 100, ..Default::default() }).unwrap();
    let mut opt = Optimizer::builder(&ctx).max_norm(1.0).scaler(&scaler).build().unwrap();
    opt.add_group(&AdamW { lr: 0.02, ..Default::default() }, &params(T::DTYPE)).unwrap();
    let mut p16: Vec<Vec<T>> =
        start().iter().map(|values| values.iter().map(|&value| narrow(value)).collect()).collect();
    let mut random = Random(11);
    let (mut first, mut last) = (0.0, 0.0);
    for step in 1..=400 {
        let wide: Vec<Vec<f32>> = p16.iter().map(|values| values.iter().map(|&value| widen(value)).collect()).collect();
        let mut grads = zeros();
        last = batch(&wide, &mut random, scaler.scale().unwrap() as f32, &mut grads);
        first = if step == 1 { last } else { first };
        let g16: Vec<Vec<T>> = grads.iter().map(|values| values.iter().map(|&value| narrow(value)).collect()).collect();
        let grads: Vec<TensorRef<'_>> = g16.iter().map(TensorRef::from).collect();
        opt.step(&mut p16.iter_mut().map(TensorMut::from).collect::<Vec<_>>(), &grads).unwrap();
    }
    let master = opt.find_state("master", Some(0)).unwrap().unwrap();
    let masters = opt.view(master).unwrap().unwrap().as_f32().unwrap();
    for (&p, &master) in p16[0].iter().zip(masters) {
        assert_eq!(widen(p), widen(narrow(master)), "a parameter is its master, rounded");
    }
    (first, last, opt.report().unwrap().skipped)
}

#[test]
fn trains_in_half_precision() {
    let (first, last, skipped) = mixed(F16::from_f32, F16::to_f32, f64::powi(2.0, 24));
    assert!(last < first / 4.0, "the loss went from {first} to {last}");
    assert!(skipped > 0);
}

#[test]
fn trains_in_bfloat16() {
    let (first, last, skipped) = mixed(BF16::from_f32, BF16::to_f32, 1024.0);
    assert!(last < first / 4.0, "the loss went from {first} to {last}");
    assert_eq!(skipped, 0);
}

#[test]
fn float_conversions_match_the_library() {
    let ctx = Context::cpu().unwrap();
    let wide: Vec<f32> = (0..=u16::MAX).step_by(3).map(|high| f32::from_bits(u32::from(high) << 16 | 0x9fff)).collect();
    let mut wide: Vec<f32> = wide.into_iter().filter(|value| !value.is_nan()).collect();
    wide.extend([65504.0, 65519.99, 65520.0, 5.96e-8, 2.98e-8, 2.99e-8, 6.1e-5, 0.0, -0.0, f32::INFINITY, 1.0 / 3.0]);
    let mut f16 = vec![F16(0); wide.len()];
    let mut bf16 = vec![BF16(0); wide.len()];
    let x = [TensorRef::from(&wide), TensorRef::from(&wide)];
    ctx.axpby(1.0, &x, 0.0, &mut [(&mut f16).into(), (&mut bf16).into()]).unwrap();
    for ((&value, &f16), &bf16) in wide.iter().zip(&f16).zip(&bf16) {
        assert_eq!((F16::from_f32(value), BF16::from_f32(value)), (f16, bf16), "{value:e}");
    }
    let all: Vec<F16> = (0..=u16::MAX).map(F16).filter(|half| !half.to_f32().is_nan()).collect();
    let mut wide = vec![0.0f32; all.len()];
    ctx.axpby(1.0, &[(&all).into()], 0.0, &mut [(&mut wide).into()]).unwrap();
    assert!(all.iter().zip(&wide).all(|(half, wide)| half.to_f32().to_bits() == wide.to_bits()));
    assert!(F16::from_f32(f32::NAN).to_f32().is_nan() && BF16::from_f32(f32::NAN).to_f32().is_nan());
}

#[test]
fn apply_gives_same_bits_as_step() {
    let ctx = Context::builder().threads(1).build().unwrap();
    let mut opt = Optimizer::new(&ctx).unwrap();
    opt.add_group(&AdamW::default(), &params(Dtype::F32)).unwrap();
    let (mut p, mut q) = (start(), start());
    let mut state = opt.new_state(&mut tensors(&mut q)).unwrap();
    let mut workspace = Vec::new();
    let mut random = Random(3);
    for step in 0..20 {
        let mut grads = zeros();
        batch(&p, &mut random, 1.0, &mut grads);
        let lr = [0.001 * (step + 1) as f32];
        opt.step_with(Step::new(&mut tensors(&mut p), &refs(&grads)).lr(&lr)).unwrap();
        let rows = [Hyper { lr: lr[0], ..Hyper::default() }];
        let mut state: Vec<TensorMut<'_>> = state.iter_mut().map(Array::as_tensor_mut).collect();
        opt.apply(Step::new(&mut tensors(&mut q), &refs(&grads)).hyper(&rows), &mut state, &mut workspace).unwrap();
        assert_eq!(p, q);
    }
}

#[test]
fn step_computes_the_keras_formula() {
    let adamw = AdamW { lr: 1.0, eps: 0.1, eps_uncorrected: true, ..Default::default() };
    let adam = Adam { lr: 1.0, eps: 0.1, eps_uncorrected: true, ..Default::default() };
    for group in [&adamw as &dyn Group, &adam] {
        let mut opt = Optimizer::new(&Context::cpu().unwrap()).unwrap();
        opt.add_group(group, &support::f32_params(&[2])).unwrap();
        let (mut w, g) = ([0.0f32; 2], [1.0f32, -2.0]);
        opt.step(&mut [(&mut w[..]).into()], &[(&g[..]).into()]).unwrap();
        // m = 0.1 g and v = 0.001 g^2. The bias correction sqrt(c2) / c1 turns m into sqrt(0.001) g.
        let root = 0.001f32.sqrt();
        for (w, g) in w.iter().zip(g) {
            assert!((w + root * g / (root * g.abs() + 0.1)).abs() < 1e-6, "{w} for {g}");
        }
        assert_eq!(opt.get(None, Key::EpsUncorrected).unwrap(), 1.0);
        opt.set(None, Key::EpsUncorrected, 0.0).unwrap();
        assert_eq!(opt.get(None, Key::EpsUncorrected).unwrap(), 0.0);
    }
    let mut opt = Optimizer::new(&Context::cpu().unwrap()).unwrap();
    let refused = opt.add_group(&AdamW { bias_correction: false, ..adamw }, &[]).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported);
    assert!(refused.text().contains("eps_uncorrected"), "{refused}");
}

/// Returns one weight that starts as 1, after steps with these gradients, and the optimizer.
fn trained(group: &dyn Group, gradients: &[f32]) -> (f32, Optimizer) {
    let mut opt = Optimizer::new(&Context::cpu().unwrap()).unwrap();
    opt.add_group(group, &support::f32_params(&[1])).unwrap();
    let mut w = [1.0f32];
    for g in gradients.chunks(1) {
        opt.step(&mut [(&mut w[..]).into()], &[g.into()]).unwrap();
    }
    (w[0], opt)
}

#[test]
fn trains_with_sgd() {
    let plain = Sgd { lr: 0.5, ..Default::default() };
    assert_eq!(trained(&plain, &[0.5, -0.25]).0, 0.875); // 1 - 0.25 + 0.125
    let damped = Sgd { momentum: 0.5, dampening: 0.5, ..plain };
    assert_eq!(trained(&damped, &[0.5, -0.25]).0, 0.6875); // b is 0.5, then 0.25 - 0.125
    let nesterov = Sgd { dampening: 0.0, nesterov: true, ..damped };
    assert_eq!(trained(&nesterov, &[0.5, -0.25]).0, 0.75); // b is 0.5, then 0; g + b/2 is 0.75, then -0.25
    let decayed = Sgd { weight_decay: 0.5, nesterov: false, ..nesterov };
    let (w, mut opt) = trained(&decayed, &[0.5, -0.25]);
    assert_eq!(w, 0.25); // b is 1, then 0.5 + 0
    assert_eq!(opt.state_info(0).unwrap().name, "momentum_buffer");

    // A row of Hyper has the momentum of one step: b = 0.25 * 0.5 + 0.5, without the decay.
    let (mut w, g) = ([1.0f32], [0.5f32]);
    let rows = [Hyper { momentum: 0.25, weight_decay: 0.0, ..Hyper::default() }];
    opt.step_with(Step::new(&mut [(&mut w[..]).into()], &[(&g[..]).into()]).hyper(&rows)).unwrap();
    assert_eq!(w[0], 1.0 - 0.5 * (0.25 * 0.5 + 0.5));

    assert_eq!(opt.get(None, Key::Momentum).unwrap(), 0.5);
    opt.set(None, Key::Dampening, 0.25).unwrap();
    assert_eq!(opt.get(None, Key::Dampening).unwrap(), 0.25);
    let refused = opt.set(None, Key::Nesterov, 1.0).unwrap_err();
    assert!(refused.kind() == ErrorKind::Argument && refused.text().contains("dampening"), "{refused}");
    assert_eq!(opt.get(None, Key::Nesterov).unwrap(), 0.0);
    assert_eq!(opt.set(None, Key::Momentum, 0.0).unwrap_err().kind(), ErrorKind::Unsupported);
    assert_eq!(opt.get(None, Key::LrDecay).unwrap_err().kind(), ErrorKind::Unsupported);
}

#[test]
fn trains_with_adagrad() {
    let near = |w: f32, exact: f32| assert!((w - exact).abs() < 1e-6, "{w}, expected {exact}");
    let group = Adagrad { lr: 0.5, eps: 0.5, ..Default::default() };
    near(trained(&group, &[3.0, 4.0]).0, 1.0 - 0.5 * 3.0 / 3.5 - 0.5 * 4.0 / 5.5);
    let group = Adagrad { lr_decay: 1.0, initial_accumulator_value: 16.0, ..group };
    near(trained(&group, &[3.0, 4.0]).0, 1.0 - 0.5 * 3.0 / 5.5 - 0.25 * 4.0 / (41f32.sqrt() + 0.5));
    let (w, mut opt) = trained(&Adagrad { eps_inside_sqrt: true, ..group }, &[3.0]);
    near(w, 1.0 - 0.5 * 3.0 / 25.5f32.sqrt());
    assert_eq!(opt.view(opt.find_state("sum", Some(0)).unwrap().unwrap()).unwrap().unwrap().as_f32().unwrap(), [25.0]);
    assert_eq!(opt.get(None, Key::InitialAccumulatorValue).unwrap(), 16.0);
    opt.set(None, Key::LrDecay, 2.0).unwrap();
    assert_eq!(opt.get(None, Key::LrDecay).unwrap(), 2.0);
    let refused = opt.set(None, Key::InitialAccumulatorValue, -1.0).unwrap_err();
    assert!(refused.text().contains("initial_accumulator_value"), "{refused}");
}

#[test]
fn trains_with_lion() {
    let group = Lion { lr: 0.25, beta1: 0.5, beta2: 0.75, ..Default::default() };
    assert_eq!(trained(&group, &[4.0, -0.5, -4.0]).0, 0.75); // m is 1, then 0.625: two steps down, one up
    let (w, mut opt) = trained(&Lion { weight_decay: 0.5, ..group }, &[4.0, 0.0]);
    assert_eq!(w, 0.296875); // 1 - 0.25 * 1.5 is 0.625, less 0.25 * 1.3125
    assert_eq!(opt.state_info(0).unwrap().name, "exp_avg");
    assert_eq!(opt.view(0).unwrap().unwrap().as_f32().unwrap(), [0.75]);
    assert_eq!(opt.get(None, Key::Beta2).unwrap(), 0.75);
    assert_eq!(opt.set(None, Key::Eps, 1e-8).unwrap_err().kind(), ErrorKind::Unsupported);
}

#[test]
fn out_only_and_delta_write_to_the_outputs() {
    let ctx = Context::cpu().unwrap();
    let w = vec![1.0f32, -2.0];
    let g = vec![0.25f32, 0.5];
    let run = |step: &mut dyn FnMut(&mut Optimizer, &mut [TensorMut<'_>])| {
        let mut opt = Optimizer::new(&ctx).unwrap();
        opt.add_group(&AdamW::default(), &[Param::new("w", Dtype::F32, 2)]).unwrap();
        let mut out = vec![0.0f32; 2];
        step(&mut opt, &mut [(&mut out).into()]);
        out
    };
    let new = run(&mut |opt, out| opt.step_with(Step::out_only(&[(&w).into()], &[(&g).into()], out)).unwrap());
    let delta = run(&mut |opt, out| opt.step_with(Step::delta(&[(&w).into()], &[(&g).into()], out)).unwrap());
    assert_eq!(new, [w[0] + delta[0], w[1] + delta[1]]);
    assert!(delta.iter().all(|&change| change < 0.0));
}

#[test]
fn step_accepts_accumulated_absent_and_empty_gradients() {
    let ctx = Context::cpu().unwrap();
    let mut opt = Optimizer::builder(&ctx).accumulators().nonfinite(Nonfinite::Skip).build().unwrap();
    let group = AdamW { lr: 0.1, weight_decay: 0.0, ..Default::default() };
    opt.add_group(&group, &support::f32_params(&[2, 0, 1])).unwrap();
    let (mut a, mut none, mut c) = (vec![1.0f32; 2], Vec::<f32>::new(), vec![1.0f32]);
    let (ga, gnone) = (vec![1.0f32, -1.0], Vec::<f32>::new());
    for _ in 0..2 {
        opt.accumulate(&[(&ga).into(), (&gnone).into(), TensorRef::absent()]).unwrap();
    }
    let mut list = [(&mut a).into(), (&mut none).into(), (&mut c).into()];
    opt.step_with(Step::accumulated(&mut list).grad_scale(2.0)).unwrap();
    assert_eq!(c, [1.0], "nothing was accumulated");
    assert!((a[0] - 0.9).abs() < 1e-3 && (a[1] - 1.1).abs() < 1e-3, "{a:?}");

    // A NaN: the step is skipped, and the report has its position.
    let bad = vec![f32::NAN];
    let (before, mut report) = (a.clone(), StepReport::default());
    let mut list = [(&mut a).into(), (&mut none).into(), (&mut c).into()];
    let grads = [TensorRef::from(&ga), TensorRef::from(&gnone), TensorRef::from(&bad)];
    opt.step_with(Step::new(&mut list, &grads).report(&mut report)).unwrap();
    assert_eq!((report.skipped(), report.first_bad(), report.nonfinite()), (true, Some(2), 1));
    assert!(report.reasons().gradients() && !report.reasons().caller());
    assert_eq!(report.weight_norm(), None);
    opt.step_with(Step::new(&mut list, &grads).report(&mut report).no_nan()).unwrap();
    assert_eq!(report.weight_norm(), None, "-1 in the report");
    assert!(!format!("{report:?}").contains("NaN"), "{report:?}");
    assert_eq!(a, before);
    assert_eq!(opt.report().unwrap().first_bad, Some((2, "p2".to_string())));
}
