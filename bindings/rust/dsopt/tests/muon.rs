// SPDX-License-Identifier: Apache-2.0
//! Muon next to the same iterations in f64: fields, blocks of a tensor, a group beside it, ranks and refusals.
mod support;
use dsopt::{
    AdamW, Adjust, Comm, CommId, CommKind, Context, Dtype, ErrorKind, Key, LoadOptions, Moment, Muon, NsSchedule,
    Optimizer, Param, Shard, TensorMut, TensorRef, BF16,
};
use std::io::Cursor;
use support::{context, ranks, Random};

/// A matrix in f64.
#[derive(Clone)]
struct Matrix {
    rows: usize,
    cols: usize,
    values: Vec<f64>,
}

impl Matrix {
    fn of(rows: usize, cols: usize, at: impl Fn(usize, usize) -> f64) -> Matrix {
        let values = (0..rows * cols).map(|i| at(i / cols, i % cols)).collect();
        Matrix { rows, cols, values }
    }

    fn at(&self, row: usize, col: usize) -> f64 {
        self.values[row * self.cols + col]
    }

    fn transposed(&self) -> Matrix {
        Matrix::of(self.cols, self.rows, |row, col| self.at(col, row))
    }

    fn times(&self, other: &Matrix) -> Matrix {
        Matrix::of(self.rows, other.cols, |row, col| (0..self.cols).map(|k| self.at(row, k) * other.at(k, col)).sum())
    }

    fn norm(&self) -> f64 {
        self.values.iter().map(|x| x * x).sum::<f64>().sqrt()
    }
}

fn orthogonalised(u: &Matrix, triples: &[(f64, f64, f64)]) -> Matrix {
    if u.rows > u.cols {
        return orthogonalised(&u.transposed(), triples).transposed();
    }
    let scale = 1.0 / u.norm().max(1e-7);
    let mut x = Matrix::of(u.rows, u.cols, |row, col| u.at(row, col) * scale);
    for &(a, b, c) in triples {
        let gram = x.times(&x.transposed());
        let square = gram.times(&gram);
        let factor = Matrix::of(u.rows, u.rows, |row, col| b * gram.at(row, col) + c * square.at(row, col));
        let product = factor.times(&x);
        x = Matrix::of(u.rows, u.cols, |row, col| a * x.at(row, col) + product.at(row, col));
    }
    x
}

const YOU: [(f64, f64, f64); 5] = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
];

fn triples(group: &Muon) -> Vec<(f64, f64, f64)> {
    let steps = 0..group.ns_steps as usize;
    match group.ns_schedule {
        NsSchedule::Constant(a, b, c) => steps.map(|_| (a, b, c)).collect(),
        NsSchedule::You => steps.map(|step| YOU[step.min(4)]).collect(),
        _ => panic!("no reference"),
    }
}

fn adjustment(adjust: Adjust, outputs: usize, inputs: usize) -> f64 {
    let (r, c) = (outputs as f64, inputs as f64);
    match adjust {
        Adjust::Original => (r / c).max(1.0).sqrt(),
        Adjust::MatchRmsAdamw => 0.2 * r.max(c).sqrt(),
        Adjust::Spectral => (r / c).sqrt(),
        _ => 1.0,
    }
}

/// One matrix of a parameter in f64.
struct Reference {
    weight: Matrix,
    momentum: Matrix,
    steps: i32,
    outputs: usize,
    inputs: usize,
    /// Sum of lr adjust |O|, to which errors are relative.
    moved: f64,
}

impl Reference {
    fn new(weight: Matrix, rows_are_inputs: bool) -> Reference {
        let (rows, cols) = (weight.rows, weight.cols);
        let (outputs, inputs) = if rows_are_inputs { (cols, rows) } else { (rows, cols) };
        Reference { momentum: Matrix::of(rows, cols, |_, _| 0.0), weight, steps: 0, outputs, inputs, moved: 0.0 }
    }

    fn step(&mut self, group: &Muon, grad: &Matrix) {
        self.steps += 1;
        let mu = group.momentum;
        for (m, g) in self.momentum.values.iter_mut().zip(&grad.values) {
            *m = mu * *m + (1.0 - mu) * g;
        }
        let (mut r, mut s) = if group.nesterov { (1.0 - mu, mu) } else { (0.0, 1.0) };
        if group.bias_correction {
            r /= 1.0 - mu.powi(self.steps);
            s /= 1.0 - mu.powi(self.steps + 1);
        }
        let u = Matrix::of(grad.rows, grad.cols, |row, col| r * grad.at(row, col) + s * self.momentum.at(row, col));
        let update = orthogonalised(&u, &triples(group));
        let rate = group.lr * adjustment(group.adjust, self.outputs, self.inputs);
        for (p, o) in self.weight.values.iter_mut().zip(&update.values) {
            *p = *p * (1.0 - group.lr * group.weight_decay) - rate * o;
        }
        self.moved += rate * update.norm();
    }
}

/// How a parameter of dims is cut, as functions from a matrix, row and column to an element.
struct Cut {
    param: Param,
    rows: usize,
    cols: usize,
    count: usize,
    rows_are_inputs: bool,
    index: fn(usize, usize, usize) -> usize,
}

/// Steps of the library next to the reference. Returns the largest error, relative to the sum of updates.
fn error(group: &Muon, cut: &Cut) -> f64 {
    let numel = cut.rows * cut.cols * cut.count;
    let block = |values: &[f32], matrix: usize| {
        Matrix::of(cut.rows, cut.cols, |row, col| f64::from(values[(cut.index)(matrix, row, col)]))
    };
    let mut opt = Optimizer::new(&context()).unwrap();
    opt.add_group(group, std::slice::from_ref(&cut.param)).unwrap();
    let mut w = Random(7).vec(numel);
    let mut references: Vec<_> =
        (0..cut.count).map(|matrix| Reference::new(block(&w, matrix), cut.rows_are_inputs)).collect();
    for step in 0..4 {
        let g = Random(100 + step).vec(numel);
        opt.step(&mut [(&mut w).into()], &[(&g).into()]).unwrap();
        for (matrix, reference) in references.iter_mut().enumerate() {
            reference.step(group, &block(&g, matrix));
        }
    }
    let errors = references.iter().enumerate().map(|(matrix, reference)| {
        let weight = block(&w, matrix);
        let difference = Matrix::of(cut.rows, cut.cols, |row, col| weight.at(row, col) - reference.weight.at(row, col));
        difference.norm() / reference.moved
    });
    errors.fold(0.0, f64::max)
}

fn whole(rows: usize, cols: usize, index: fn(usize, usize, usize) -> usize) -> Cut {
    let param = Param::shaped("w", Dtype::F32, &[rows, cols]);
    Cut { param, rows, cols, count: 1, rows_are_inputs: false, index }
}

fn square() -> Cut {
    whole(24, 24, |_, row, col| 24 * row + col)
}

fn wide() -> Cut {
    whole(16, 40, |_, row, col| 40 * row + col)
}

fn tall() -> Cut {
    whole(40, 16, |_, row, col| 16 * row + col)
}

const F32_BOUND: f64 = 5e-5;

fn exact() -> Muon {
    Muon { lr: 0.02, ns_dtype: Dtype::F32, ..Default::default() }
}

#[test]
fn steps_follow_the_iterations_in_f64() {
    for cut in [square(), wide(), tall()] {
        for (ns_dtype, bound) in [(Dtype::F32, F32_BOUND), (Dtype::F16, 5e-3), (Dtype::BF16, 4e-2)] {
            let found = error(&Muon { ns_dtype, ..exact() }, &cut);
            assert!(found < bound, "{ns_dtype:?}: {found}");
            assert_eq!(ns_dtype == Dtype::F32, found < F32_BOUND, "{ns_dtype:?}: {found}");
        }
    }
}

#[test]
fn fields_reach_the_library() {
    for group in [
        Muon { momentum: 0.8, weight_decay: 0.0, ..exact() },
        Muon { nesterov: false, ..exact() },
        Muon { bias_correction: true, ..exact() },
        Muon { ns_steps: 3, ..exact() },
        Muon { ns_schedule: NsSchedule::You, ns_steps: 6, ..exact() },
        Muon { ns_schedule: NsSchedule::Constant(2.0, -1.5, 0.5), ..exact() },
        Muon { adjust: Adjust::MatchRmsAdamw, ..exact() },
        Muon { adjust: Adjust::Spectral, ..exact() },
        Muon { adjust: Adjust::None, ..exact() },
    ] {
        for cut in [wide(), tall()] {
            let found = error(&group, &cut);
            assert!(found < F32_BOUND, "{group:?}: {found}");
        }
    }
    let mut opt = Optimizer::new(&context()).unwrap();
    opt.add_group(&Muon { eps: 1e-3, ..Default::default() }, &[]).unwrap();
    opt.add_group(&Muon { ns_schedule: NsSchedule::PolarExpress, max_norm: 1.0, ..Default::default() }, &[]).unwrap();
    let get = |group, key| opt.get(Some(group), key).unwrap();
    assert_eq!([Key::NsA, Key::NsB, Key::NsC].map(|key| get(0, key)), [3.4445, -4.7750, 2.0315]);
    assert_eq!([Key::Eps, Key::NsSteps, Key::NsSchedule].map(|key| get(0, key)), [1e-3, 5.0, 0.0]);
    assert_eq!([Key::NsA, Key::NsSchedule, Key::GroupMaxNorm].map(|key| get(1, key)), [0.0, 1.0, 1.0]);
    assert_eq!(get(1, Key::NsDtype), f64::from(Dtype::BF16 as i32));
    opt.set(Some(1), Key::Adjust, f64::from(Adjust::Spectral as i32)).unwrap();
    assert_eq!(opt.get(Some(1), Key::Adjust).unwrap(), 2.0);
    assert!(opt.set(Some(1), Key::NsDtype, 1.0).is_err(), "read only");
}

#[test]
fn blocks_are_matrices_of_their_own() {
    let cut = |param: Param, rows, cols, count, index| Cut { param, rows, cols, count, rows_are_inputs: false, index };
    let shaped = |dims: &[usize]| Param::shaped("w", Dtype::F32, dims);
    for mut cut in [
        cut(shaped(&[60, 18]).blocks(20, 18), 20, 18, 3, |matrix, row, col| 360 * matrix + 18 * row + col),
        cut(shaped(&[20, 2, 3, 3]).blocks(20, 18), 20, 18, 1, |_, row, col| 18 * row + col),
        cut(shaped(&[18, 60]).blocks(18, 20), 18, 20, 3, |matrix, row, col| 60 * row + 20 * matrix + col),
        cut(Param::new("w", Dtype::F32, 720).blocks(20, 18), 20, 18, 2, |matrix, row, col| {
            360 * matrix + 18 * row + col
        }),
    ] {
        assert!(error(&exact(), &cut) < F32_BOUND, "{:?}", cut.param);
        cut.param = cut.param.rows_are_inputs();
        cut.rows_are_inputs = true;
        assert!(error(&exact(), &cut) < F32_BOUND, "{:?}", cut.param);
    }
}

const DIMS: [[usize; 2]; 3] = [[20, 20], [16, 48], [48, 16]];

/// Matrices with Muon and a bias with AdamW.
fn mixed(mut opt: Optimizer) -> Optimizer {
    let names = ["a", "b", "c"].into_iter().zip(&DIMS);
    let params: Vec<_> = names.map(|(name, dims)| Param::shaped(name, Dtype::BF16, dims)).collect();
    opt.add_group(&Muon { lr: 0.02, exp_avg_format: Moment::Bf16Random, ..Default::default() }, &params).unwrap();
    opt.add_group(&AdamW { lr: 0.01, ..Default::default() }, &[Param::new("bias", Dtype::BF16, 20)]).unwrap();
    opt
}

fn weights(seed: u32) -> Vec<Vec<BF16>> {
    let mut random = Random(seed);
    let sizes = DIMS.iter().map(|dims| dims[0] * dims[1]).chain([20]);
    sizes.map(|size| random.vec(size).into_iter().map(BF16::from_f32).collect()).collect()
}

fn muts(weights: &mut [Vec<BF16>]) -> Vec<TensorMut<'_>> {
    weights.iter_mut().map(TensorMut::from).collect()
}

fn train(opt: &mut Optimizer, w: &mut [Vec<BF16>], steps: std::ops::Range<u32>) {
    for step in steps {
        let grads = weights(1000 + step);
        opt.step(&mut muts(w), &grads.iter().map(TensorRef::from).collect::<Vec<_>>()).unwrap();
    }
}

#[test]
fn a_loaded_run_continues_with_the_same_bits() {
    let ctx = Context::cpu().unwrap();
    let (mut opt, mut w) = (mixed(Optimizer::new(&ctx).unwrap()), weights(1));
    train(&mut opt, &mut w, 0..3);
    let mut file = Vec::new();
    opt.save_to(&mut file, &w.iter().map(TensorRef::from).collect::<Vec<_>>()).unwrap();
    let (mut other, mut v) = (mixed(Optimizer::new(&ctx).unwrap()), weights(2));
    other.load_from(&mut [Cursor::new(&file)], LoadOptions::default(), &mut muts(&mut v)).unwrap();
    assert_eq!(v, w);
    train(&mut opt, &mut w, 3..6);
    train(&mut other, &mut v, 3..6);
    assert_eq!(v, w);
    let momentum = opt.find_state("momentum_buffer", Some(0)).unwrap().unwrap();
    assert_eq!(opt.state_info(momentum).unwrap().dtype, Dtype::BF16);
    assert_eq!(opt.find_state("momentum_buffer", Some(3)).unwrap(), None);
}

#[test]
fn ranks_that_split_matrices_have_the_bits_of_one_rank() {
    let mut expected = weights(1);
    train(&mut mixed(Optimizer::new(&context()).unwrap()), &mut expected, 0..3);
    for count in [1, 2, 5] {
        let id = CommId::new(CommKind::Local).unwrap();
        for w in ranks(count, |rank| {
            let ctx = context();
            let comm = Comm::connect(&ctx, &id, rank, count).unwrap();
            let mut opt = mixed(Optimizer::builder(&ctx).data(comm).split_matrices().build().unwrap());
            let mut w = weights(1);
            train(&mut opt, &mut w, 0..3);
            w
        }) {
            assert!(w == expected, "{count} ranks");
        }
    }
}

#[track_caller]
fn refused<T>(result: dsopt::Result<T>, kind: ErrorKind, text: &str) {
    let error = result.err().expect("an error");
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.text().contains(text), "{error}");
}

#[test]
fn groups_and_parameters_that_cannot_be_are_refused() {
    let ctx = Context::cpu().unwrap();
    let param = || Param::shaped("w", Dtype::F32, &[4, 6]);
    let add = |group: &dyn dsopt::Group, param: Param| Optimizer::new(&ctx)?.add_group(group, &[param]);
    let (argument, unsupported) = (ErrorKind::Argument, ErrorKind::Unsupported);
    let plain = Muon::default();
    refused(add(&Muon { momentum: 1.0, ..plain }, param()), argument, "momentum is 1");
    refused(add(&Muon { ns_steps: 100, ..plain }, param()), argument, "ns_steps");
    refused(add(&Muon { ns_schedule: NsSchedule::Constant(f64::NAN, 0.0, 0.0), ..plain }, param()), argument, "ns_a");
    refused(add(&Muon { eps: 2.0, ..plain }, param()), argument, "eps is 2");
    refused(add(&Muon { ns_dtype: Dtype::I32, ..plain }, param()), argument, "ns_dtype");
    refused(add(&Muon { nesterov: false, bias_correction: true, ..plain }, param()), unsupported, "bias correction");
    refused(add(&Muon { exp_avg_format: Moment::Q8, ..plain }, param()), unsupported, "Q8");
    refused(add(&plain, Param::new("w", Dtype::F32, 24)), argument, "'w'");
    refused(add(&plain, param().blocks(4, 0)), argument, "rows 4 and cols 0");
    refused(add(&plain, param().blocks(usize::MAX, usize::MAX)), argument, "2^31");
    refused(add(&plain, param().blocks(3, 6)), ErrorKind::Shape, "matrices of 3 x 6");
    refused(add(&plain, param().model_parallel()), unsupported, "MODEL_PARALLEL");
    refused(add(&plain, param().offset(24)), unsupported, "'w' has offset 24");
    refused(add(&AdamW::default(), param().blocks(4, 6)), unsupported, "'w'");
    refused(add(&AdamW::default(), param().rows_are_inputs()), unsupported, "ROWS_ARE_INPUTS");

    let builder = || {
        let id = CommId::new(CommKind::Local).unwrap();
        Optimizer::builder(&ctx).data(Comm::connect(&ctx, &id, 0, 1).unwrap())
    };
    refused(Optimizer::builder(&ctx).split_matrices().build(), unsupported, "SPLIT_MATRICES has no effect without");
    refused(
        builder().split_matrices().shard(Shard::Data).build(),
        unsupported,
        "SPLIT_MATRICES has no effect with SHARD",
    );
    let mut opt = builder().split_matrices().build().unwrap();
    opt.add_group(&AdamW::default(), &[param()]).unwrap();
    let (mut w, g) = ([0.0f32; 24], [0.0f32; 24]);
    refused(opt.step(&mut [(&mut w).into()], &[(&g).into()]), unsupported, "without a group of muon");
}
