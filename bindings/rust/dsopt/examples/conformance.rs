// SPDX-License-Identifier: Apache-2.0
//! The conformance program in Rust; bindings/conformance defines what it computes.
use dsopt::{
    AdamW, Comm, CommId, CommKind, Context, Dtype, Element, Moment, OneBitAdam, Optimizer, Param, Result, TensorMut,
    TensorRef, View, BF16,
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

const ADAMW: [(&str, usize); 3] = [("a", 1), ("b", 7), ("c", 4099)];
const ONEBIT: [(&str, usize); 2] = [("u", 5), ("v", 130)];

fn params(sizes: &[(&str, usize)], dtype: Dtype) -> Vec<Param> {
    sizes.iter().map(|&(name, size)| Param::new(name, dtype, size)).collect()
}

fn initial<T>(sizes: &[(&str, usize)], seed: u32, from: fn(f32) -> T) -> Vec<Vec<T>> {
    let mut start = Generator(seed);
    sizes.iter().map(|&(_, size)| start.values(size).into_iter().map(from).collect()).collect()
}

fn train<T: Element>(
    opt: &mut Optimizer,
    sizes: &[(&str, usize)],
    mut weights: Vec<Vec<T>>,
    grad_seed: u32,
    steps: usize,
) -> Result<Vec<Vec<T>>> {
    let mut random = Generator(grad_seed);
    for _ in 0..steps {
        let grads: Vec<_> = sizes.iter().map(|&(_, size)| random.values(size)).collect();
        let mut list: Vec<TensorMut> = weights.iter_mut().map(TensorMut::from).collect();
        opt.step(&mut list, &grads.iter().map(TensorRef::from).collect::<Vec<_>>())?;
    }
    Ok(weights)
}

fn adamw(digest: &mut Digest) -> Result<()> {
    let mut opt = Optimizer::builder(&Context::cpu()?).max_norm(1.0).build()?;
    opt.add_group(&AdamW { lr: 0.015625, weight_decay: 0.125, ..Default::default() }, &params(&ADAMW, Dtype::F32))?;
    let weights = train(&mut opt, &ADAMW, initial(&ADAMW, 12345, f32::from), 1000, 10)?;
    weights.iter().for_each(|values| digest.add_f32(values));
    digest.add_state(&opt, "exp_avg")?;
    digest.add_state(&opt, "exp_avg_sq")
}

fn onebit_rank(id: &CommId, rank: usize) -> Result<Vec<Vec<f32>>> {
    let ctx = Context::cpu()?;
    let mut opt = Optimizer::builder(&ctx).data(Comm::connect(&ctx, id, rank, 2)?).averages().build()?;
    opt.add_group(&OneBitAdam { lr: 0.015625, freeze_step: 3, ..Default::default() }, &params(&ONEBIT, Dtype::F32))?;
    train(&mut opt, &ONEBIT, initial(&ONEBIT, 54321, f32::from), 2000 + rank as u32, 6)
}

fn onebit(digest: &mut Digest) -> Result<()> {
    let id = CommId::new(CommKind::Local)?;
    let (first, second) = thread::scope(|scope| {
        let other = scope.spawn(|| onebit_rank(&id, 1));
        (onebit_rank(&id, 0), other.join().expect("no panic"))
    });
    let first = first?;
    assert_eq!(first, second?, "the ranks have different weights");
    first.iter().for_each(|values| digest.add_f32(values));
    Ok(())
}

fn low_precision(digest: &mut Digest) -> Result<()> {
    let mut opt = Optimizer::builder(&Context::cpu()?).remainder_masters().seed(7).build()?;
    let group = AdamW { lr: 0.015625, weight_decay: 0.125, ..Default::default() };
    let small = AdamW { exp_avg_format: Moment::E4m3, exp_avg_sq_format: Moment::Bf16Random, ..group };
    let large = AdamW { exp_avg_format: Moment::Q8, exp_avg_sq_format: Moment::Q8, ..group };
    opt.add_group(&small, &params(&ADAMW[..2], Dtype::BF16))?;
    opt.add_group(&large, &params(&ADAMW[2..], Dtype::BF16))?;
    let weights = train(&mut opt, &ADAMW, initial(&ADAMW, 12345, BF16::from_f32), 1000, 10)?;
    weights.iter().for_each(|values| digest.add_bf16(values));
    for name in ["remainder", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"] {
        digest.add_state(&opt, name)?;
    }
    Ok(())
}

fn main() -> Result<()> {
    let mut digest = Digest(0xcbf2_9ce4_8422_2325);
    adamw(&mut digest)?;
    onebit(&mut digest)?;
    low_precision(&mut digest)?;
    println!("rust {:016x}", digest.0);
    Ok(())
}
