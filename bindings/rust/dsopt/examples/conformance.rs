// SPDX-License-Identifier: Apache-2.0
//! The conformance program in Rust; bindings/conformance defines what it computes.
use dsopt::{
    AdamW, Comm, CommId, CommKind, Context, Dtype, Element, LoadOptions, Moment, Muon, OneBitAdam, Optimizer, Param,
    Result, Scaler, ScalerOptions, Shard, Step, TensorMut, TensorRef, View, BF16, F16,
};
use std::thread;

struct Generator(u32);

impl Generator {
    fn values(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.next()).collect()
    }

    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (self.0 >> 8) as f32 / 16_777_216.0 - 0.5 // 24 bits: exact
    }
}

struct Digest(u64);

impl Digest {
    fn new() -> Digest {
        Digest(0xcbf2_9ce4_8422_2325)
    }

    fn add(&mut self, bytes: impl Iterator<Item = u8>) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    fn add_f32(&mut self, values: &[f32]) {
        self.add(values.iter().flat_map(|value| value.to_le_bytes()));
    }

    fn add_bf16(&mut self, values: &[BF16]) {
        self.add(values.iter().flat_map(|value| value.0.to_le_bytes()));
    }

    fn add_all(&mut self, tensors: &[Vec<f32>]) {
        tensors.iter().for_each(|values| self.add_f32(values));
    }

    fn add_states(&mut self, opt: &Optimizer, names: &[&str]) -> Result<()> {
        names.iter().try_for_each(|name| self.add_state(opt, name))
    }

    /// The entries of this name, in the order of their parameters.
    fn add_state(&mut self, opt: &Optimizer, name: &str) -> Result<()> {
        for (index, entry) in opt.state()?.iter().enumerate().filter(|(_, entry)| entry.name == name) {
            match opt.view(index)?.expect("there was a step") {
                View::F32(values) => self.add_f32(values),
                View::BF16(values) => self.add_bf16(values),
                View::I16(values) => self.add(values.iter().flat_map(|value| value.to_le_bytes())),
                View::U8(values) => self.add(values.iter().copied()),
                View::F8E4M3(values) => self.add(values.iter().map(|value| value.0)),
                _ => panic!("{name} has dtype {:?}", entry.dtype),
            }
        }
        Ok(())
    }
}

type Sizes<'a> = [(&'a str, usize)];

const ADAMW: [(&str, usize); 3] = [("a", 1), ("b", 7), ("c", 4099)];
const ONEBIT: [(&str, usize); 2] = [("u", 5), ("v", 130)];
const SHARDED: [(&str, usize); 3] = [("a", 6), ("b", 9000), ("c", 130)];
const MUON: [(&str, usize); 3] = [("qkv", 48 * 16), ("w", 20 * 17), ("bias", 130)];

fn adamw_group() -> AdamW {
    AdamW { lr: 0.015625, weight_decay: 0.125, ..Default::default() }
}

fn params(sizes: &Sizes<'_>, dtype: Dtype) -> Vec<Param> {
    sizes.iter().map(|&(name, size)| Param::new(name, dtype, size)).collect()
}

fn initial<T>(sizes: &Sizes<'_>, seed: u32, from: fn(f32) -> T) -> Vec<Vec<T>> {
    let mut start = Generator(seed);
    sizes.iter().map(|&(_, size)| start.values(size).into_iter().map(from).collect()).collect()
}

fn gradients(sizes: &Sizes<'_>, random: &mut Generator) -> Vec<Vec<f32>> {
    sizes.iter().map(|&(_, size)| random.values(size)).collect()
}

fn train<T: Element>(
    opt: &mut Optimizer,
    sizes: &Sizes<'_>,
    mut weights: Vec<Vec<T>>,
    random: &mut Generator,
    steps: usize,
) -> Result<Vec<Vec<T>>> {
    for _ in 0..steps {
        let grads = gradients(sizes, random);
        let mut list: Vec<TensorMut> = weights.iter_mut().map(TensorMut::from).collect();
        opt.step(&mut list, &grads.iter().map(TensorRef::from).collect::<Vec<_>>())?;
    }
    Ok(weights)
}

fn adamw(digest: &mut Digest) -> Result<()> {
    let mut opt = Optimizer::builder(&Context::cpu()?).max_norm(1.0).build()?;
    opt.add_group(&adamw_group(), &params(&ADAMW, Dtype::F32))?;
    digest.add_all(&train(&mut opt, &ADAMW, initial(&ADAMW, 12345, f32::from), &mut Generator(1000), 10)?);
    digest.add_states(&opt, &["exp_avg", "exp_avg_sq"])
}

/// Runs `rank_of(rank, context, comm)` on two threads. Both must return the same weights.
fn on_two_ranks<T: Send>(
    rank_of: impl Fn(u32, &Context, Comm) -> Result<(Vec<Vec<f32>>, T)> + Sync,
) -> Result<(Vec<Vec<f32>>, [T; 2])> {
    let id = CommId::new(CommKind::Local)?;
    let start = |rank: u32| {
        let ctx = Context::cpu()?;
        let comm = Comm::connect(&ctx, &id, rank as usize, 2)?;
        rank_of(rank, &ctx, comm)
    };
    let (first, second) = thread::scope(|scope| {
        let other = scope.spawn(|| start(1));
        (start(0), other.join().expect("no panic"))
    });
    let ((weights, first), (others, second)) = (first?, second?);
    assert_eq!(weights, others, "the ranks have different weights");
    Ok((weights, [first, second]))
}

fn onebit(digest: &mut Digest) -> Result<()> {
    let (weights, _) = on_two_ranks(|rank, ctx, comm| {
        let mut opt = Optimizer::builder(ctx).data(comm).averages().build()?;
        let group = OneBitAdam { lr: 0.015625, freeze_step: 3, ..Default::default() };
        opt.add_group(&group, &params(&ONEBIT, Dtype::F32))?;
        let start = initial(&ONEBIT, 54321, f32::from);
        Ok((train(&mut opt, &ONEBIT, start, &mut Generator(2000 + rank), 6)?, ()))
    })?;
    digest.add_all(&weights);
    Ok(())
}

const KINDS: [&str; 5] = ["remainder", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"];

fn low_precision(digest: &mut Digest) -> Result<()> {
    let mut opt = Optimizer::builder(&Context::cpu()?).remainder_masters().seed(7).build()?;
    let small = AdamW { exp_avg_format: Moment::E4m3, exp_avg_sq_format: Moment::Bf16Random, ..adamw_group() };
    let large = AdamW { exp_avg_format: Moment::Q8, exp_avg_sq_format: Moment::Q8, ..adamw_group() };
    opt.add_group(&small, &params(&ADAMW[..2], Dtype::BF16))?;
    opt.add_group(&large, &params(&ADAMW[2..], Dtype::BF16))?;
    let weights = train(&mut opt, &ADAMW, initial(&ADAMW, 12345, BF16::from_f32), &mut Generator(1000), 10)?;
    weights.iter().for_each(|values| digest.add_bf16(values));
    digest.add_states(&opt, &KINDS)
}

/// The parts of the moments of this name.
fn part_of(opt: &mut Optimizer, name: &str) -> Result<Vec<f32>> {
    let mut part = Vec::new();
    for (index, entry) in opt.state()?.iter().enumerate().filter(|(_, entry)| entry.name == name) {
        let mut values = vec![0.0f32; entry.numel];
        opt.export(index, &mut values)?;
        part.extend(values);
    }
    Ok(part)
}

fn sharded(digest: &mut Digest) -> Result<()> {
    let (weights, [first, second]) = on_two_ranks(|rank, ctx, comm| {
        let mut opt = Optimizer::builder(ctx).data(comm).shard(Shard::Data).averages().max_norm(1.0).build()?;
        opt.add_group(&adamw_group(), &params(&SHARDED, Dtype::F32))?;
        let start = initial(&SHARDED, 54321, f32::from);
        let weights = train(&mut opt, &SHARDED, start, &mut Generator(3000 + rank), 5)?;
        Ok((weights, [part_of(&mut opt, "exp_avg")?, part_of(&mut opt, "exp_avg_sq")?]))
    })?;
    digest.add_all(&weights);
    first.iter().zip(&second).for_each(|(one, other)| {
        digest.add_f32(one);
        digest.add_f32(other);
    });
    Ok(())
}

fn resharded(digest: &mut Digest) -> Result<()> {
    let files = ["rust0.safetensors", "rust1.safetensors"]; // in the current folder
    let start = || initial(&SHARDED, 54321, f32::from);
    let (weights, [mut random, _]) = on_two_ranks(|rank, ctx, comm| {
        let mut opt = Optimizer::builder(ctx).data(comm).shard(Shard::Data).build()?;
        opt.add_group(&adamw_group(), &params(&SHARDED, Dtype::F32))?;
        let mut random = Generator(4000);
        let weights = train(&mut opt, &SHARDED, start(), &mut random, 3)?;
        opt.save(files[rank as usize])?;
        Ok((weights, random))
    })?;
    let mut opt = Optimizer::new(&Context::cpu()?)?;
    opt.add_group(&adamw_group(), &params(&SHARDED, Dtype::F32))?;
    opt.load_files(&files, LoadOptions::default(), &mut [])?;
    digest.add_all(&train(&mut opt, &SHARDED, weights, &mut random, 3)?);
    files.iter().for_each(|file| std::fs::remove_file(file).expect("it was saved"));
    digest.add_states(&opt, &["exp_avg", "exp_avg_sq"])
}

fn muon(digest: &mut Digest) -> Result<()> {
    let mut opt = Optimizer::new(&Context::cpu()?)?;
    let matrices = [
        Param::shaped("qkv", Dtype::F32, &[48, 16]).blocks(16, 16), // three matrices
        Param::shaped("w", Dtype::F32, &[20, 17]),
    ];
    let group = Muon { lr: 0.015625, momentum: 0.9375, weight_decay: 0.125, ..Default::default() };
    opt.add_group(&group, &matrices)?;
    let group = AdamW { lr: 0.0078125, weight_decay: 0.25, eps: 0.0, ..adamw_group() };
    opt.add_group(&group, &params(&MUON[2..], Dtype::F32))?;
    digest.add_all(&train(&mut opt, &MUON, initial(&MUON, 777, f32::from), &mut Generator(888), 5)?);
    digest.add_states(&opt, &["momentum_buffer", "exp_avg", "exp_avg_sq"])
}

fn accumulation(digest: &mut Digest) -> Result<()> {
    let ctx = Context::cpu()?;
    let scaler = Scaler::new(&ctx, ScalerOptions { init: 1024.0, window: 2, ..Default::default() })?;
    let mut opt = Optimizer::builder(&ctx).scaler(&scaler).max_norm(1.0).accumulators().build()?;
    opt.add_group(&adamw_group(), &params(&ADAMW, Dtype::F16))?;
    let mut weights = initial(&ADAMW, 12345, |value| F16::from_f32((value * 1024.0).floor() / 1024.0));
    opt.init(&mut weights.iter_mut().map(TensorMut::from).collect::<Vec<_>>())?; // masters, before the first gradients
    let mut random = Generator(5000);
    for step in 0..8 {
        let scale = scaler.scale()? as f32;
        for micro in 0..3 {
            let mut grads = gradients(&ADAMW, &mut random);
            grads.iter_mut().flatten().for_each(|value| *value *= scale);
            if (step, micro) == (3, 1) {
                grads[2][0] = f32::INFINITY;
            }
            opt.accumulate(&grads.iter().map(TensorRef::from).collect::<Vec<_>>())?;
        }
        let mut list: Vec<TensorMut> = weights.iter_mut().map(TensorMut::from).collect();
        opt.step_with(Step::accumulated(&mut list))?;
    }
    digest.add(weights.iter().flatten().flat_map(|value| value.0.to_le_bytes()));
    digest.add_states(&opt, &["master", "exp_avg", "exp_avg_sq"])?;
    digest.add_f32(&[scaler.scale()? as f32]);
    Ok(())
}

fn uncorrected(digest: &mut Digest) -> Result<()> {
    let mut opt = Optimizer::builder(&Context::cpu()?).remainder_masters().max_value(0.25).build()?;
    let formats = AdamW { exp_avg_format: Moment::E4m3, exp_avg_sq_format: Moment::Q8, ..adamw_group() };
    opt.add_group(&AdamW { eps: 0.001, eps_uncorrected: true, ..formats }, &params(&ADAMW, Dtype::BF16))?;
    let weights = train(&mut opt, &ADAMW, initial(&ADAMW, 12345, BF16::from_f32), &mut Generator(1000), 10)?;
    weights.iter().for_each(|values| digest.add_bf16(values));
    digest.add_states(&opt, &KINDS)
}

type Case = fn(&mut Digest) -> Result<()>;

fn main() -> Result<()> {
    let cases: [(&str, Case); 8] = [
        ("adamw", adamw),
        ("onebit", onebit),
        ("low_precision", low_precision),
        ("sharded", sharded),
        ("resharded", resharded),
        ("muon", muon),
        ("accumulation", accumulation),
        ("uncorrected", uncorrected),
    ];
    for (name, run) in cases {
        let mut digest = Digest::new();
        run(&mut digest)?;
        println!("rust {name} {:016x}", digest.0);
    }
    Ok(())
}
