// SPDX-License-Identifier: Apache-2.0
//! The conformance program in Rust; bindings/conformance defines what it computes.
use dsopt::{
    AdamW, Comm, CommId, CommKind, Context, Dtype, OneBitAdam, Optimizer, Param, Result, StateInfo, TensorMut,
    TensorRef,
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
    fn add(&mut self, values: &[f32]) {
        for byte in values.iter().flat_map(|value| value.to_le_bytes()) {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

const ADAMW: [(&str, usize); 3] = [("a", 1), ("b", 7), ("c", 4099)];
const ONEBIT: [(&str, usize); 2] = [("u", 5), ("v", 130)];

fn params(sizes: &[(&str, usize)]) -> Vec<Param> {
    sizes.iter().map(|&(name, size)| Param::new(name, Dtype::F32, size)).collect()
}

fn train(
    opt: &mut Optimizer,
    sizes: &[(&str, usize)],
    seed: u32,
    grad_seed: u32,
    steps: usize,
) -> Result<Vec<Vec<f32>>> {
    let (mut start, mut random) = (Generator(seed), Generator(grad_seed));
    let mut weights: Vec<_> = sizes.iter().map(|&(_, size)| start.values(size)).collect();
    for _ in 0..steps {
        let grads: Vec<_> = sizes.iter().map(|&(_, size)| random.values(size)).collect();
        let mut list: Vec<TensorMut> = weights.iter_mut().map(TensorMut::from).collect();
        opt.step(&mut list, &grads.iter().map(TensorRef::from).collect::<Vec<_>>())?;
    }
    Ok(weights)
}

fn adamw(digest: &mut Digest) -> Result<()> {
    let mut opt = Optimizer::builder(&Context::cpu()?).max_norm(1.0).build()?;
    opt.add_group(&AdamW { lr: 0.015625, weight_decay: 0.125, ..Default::default() }, &params(&ADAMW))?;
    let weights = train(&mut opt, &ADAMW, 12345, 1000, 10)?;
    weights.iter().for_each(|values| digest.add(values));
    let state = opt.state()?;
    for name in ["exp_avg", "exp_avg_sq"] {
        let named = |(_, entry): &(usize, &StateInfo)| entry.name == name;
        for (index, entry) in state.iter().enumerate().filter(named) {
            let mut values = vec![0.0f32; entry.numel];
            opt.export(index, &mut values)?;
            digest.add(&values);
        }
    }
    Ok(())
}

fn onebit_rank(id: &CommId, rank: usize) -> Result<Vec<Vec<f32>>> {
    let ctx = Context::cpu()?;
    let mut opt = Optimizer::builder(&ctx).data(Comm::connect(&ctx, id, rank, 2)?).averages().build()?;
    opt.add_group(&OneBitAdam { lr: 0.015625, freeze_step: 3, ..Default::default() }, &params(&ONEBIT))?;
    train(&mut opt, &ONEBIT, 54321, 2000 + rank as u32, 6)
}

fn onebit(digest: &mut Digest) -> Result<()> {
    let id = CommId::new(CommKind::Local)?;
    let (first, second) = thread::scope(|scope| {
        let other = scope.spawn(|| onebit_rank(&id, 1));
        (onebit_rank(&id, 0), other.join().expect("no panic"))
    });
    let first = first?;
    assert_eq!(first, second?, "the ranks have different weights");
    first.iter().for_each(|values| digest.add(values));
    Ok(())
}

fn main() -> Result<()> {
    let mut digest = Digest(0xcbf2_9ce4_8422_2325);
    adamw(&mut digest)?;
    onebit(&mut digest)?;
    println!("rust {:016x}", digest.0);
    Ok(())
}
