// SPDX-License-Identifier: Apache-2.0
//! Sharded state and averages over ranks on threads. Their bits are cases of bindings/conformance.
mod support;
use dsopt::{
    AdamW, Comm, CommId, CommKind, Dtype, ErrorKind, OneBitAdam, Optimizer, Param, Sgd, Shard, Step, TensorMut,
    TensorRef, ZeroOneAdam, BF16,
};
use support::{context, f32_params, ranks, Random};

const SIZES: [usize; 4] = [5, 0, 9000, 130];
const RANKS: usize = 3;

/// Trains with sharded state, and calls `look` at the end.
fn train(over: Shard, look: impl Fn(usize, &Optimizer) + Sync) {
    let id = CommId::new(CommKind::Local).unwrap();
    ranks(RANKS, |rank| {
        let ctx = context();
        let comm = Comm::connect(&ctx, &id, rank, RANKS).unwrap();
        let builder = Optimizer::builder(&ctx).shard(over);
        let builder = if over == Shard::Node { builder.node(comm) } else { builder.data(comm) };
        let mut opt = builder.build().unwrap();
        opt.add_group(&AdamW { lr: 0.01, ..Default::default() }, &f32_params(&SIZES)).unwrap();
        let mut random = Random(54321);
        let mut p: Vec<Vec<f32>> = SIZES.iter().map(|&size| random.vec(size)).collect();
        let grads = p.clone();
        let grads: Vec<TensorRef<'_>> = grads.iter().map(TensorRef::from).collect();
        opt.step(&mut p.iter_mut().map(TensorMut::from).collect::<Vec<_>>(), &grads).unwrap();
        look(rank, &opt);
    });
}

#[test]
fn parts_tile_and_state_is_the_part_of_the_rank() {
    let look = |rank: usize, opt: &Optimizer| {
        for (param, &size) in SIZES.iter().enumerate() {
            let mut end = 0;
            for of in 0..RANKS {
                let part = opt.shard(param, Some(of)).unwrap();
                assert_eq!(part.start, if part.is_empty() { 0 } else { end });
                assert_eq!(part.start % 4096, 0);
                end += part.len();
            }
            assert_eq!(end, size);
            assert_eq!(opt.shard(param, None).unwrap(), opt.shard(param, Some(rank)).unwrap());
        }
        for (index, entry) in opt.state().unwrap().iter().enumerate() {
            assert_eq!(entry.sharded, entry.param.is_some());
            if let Some(param) = entry.param {
                let part = opt.shard(param, None).unwrap();
                assert_eq!((entry.numel, &entry.dims), (part.len(), &vec![part.len()]));
                assert_eq!(opt.view(index).unwrap().unwrap().as_f32().unwrap().len(), part.len());
            }
        }
        for error in [opt.shard(4, None).unwrap_err(), opt.shard(0, Some(RANKS)).unwrap_err()] {
            assert_eq!(error.kind(), ErrorKind::Argument, "{error}");
        }
    };
    train(Shard::Data, look);
    train(Shard::Node, look);
    let mut whole = Optimizer::new(&context()).unwrap();
    assert_eq!(whole.shard(0, None).unwrap_err().kind(), ErrorKind::State);
    whole.add_group(&AdamW::default(), &f32_params(&SIZES)).unwrap();
    assert_eq!(whole.shard(2, None).unwrap(), 0..9000);
    assert!(!whole.state().unwrap()[0].sharded);
}

#[test]
fn what_cannot_be_sharded_is_refused() {
    let ctx = context();
    let single = || Comm::single(&ctx).unwrap();
    let sharded = || Optimizer::builder(&ctx).shard(Shard::Data);
    for (builder, text) in [
        (sharded(), "SHARD has no effect without"),
        (sharded().shard(Shard::Node).data(single()), "SHARD_NODE has no effect without"),
        (sharded().data(single()).deepspeed(), "SHARD is for standard mode"),
        (sharded().data(single()).expert(single()), "experts do not go with SHARD"),
        (Optimizer::builder(&ctx).averages(), "AVERAGES has no effect without"),
    ] {
        let error = builder.build().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.text().contains(text), "{error}");
    }
    let mut opt = sharded().data(single()).build().unwrap();
    let error = opt.add_group(&OneBitAdam::default(), &[]).unwrap_err();
    assert!(error.kind() == ErrorKind::Unsupported && error.text().contains("1-bit family"), "{error}");
    let error = opt.add_group(&ZeroOneAdam::default(), &[]).unwrap_err();
    assert!(error.kind() == ErrorKind::Unsupported && error.text().contains("0/1 Adam is not sharded"), "{error}");
    opt.add_group(&AdamW::default(), &[Param::new("w", Dtype::F32, 3)]).unwrap();
    let (mut w, g, mut out) = (vec![1.0f32; 3], vec![1.0f32; 3], vec![0.0f32; 3]);
    let (mut params, grads, mut outs) = ([TensorMut::from(&mut w)], [(&g).into()], [TensorMut::from(&mut out)]);
    let error = opt.step_with(Step::new(&mut params, &grads).out(&mut outs)).unwrap_err();
    assert!(error.kind() == ErrorKind::Unsupported && error.text().contains("dsopt_step.out"), "{error}");
    opt.step(&mut params, &grads).unwrap();
    let error = opt.add_group(&AdamW::default(), &[Param::new("x", Dtype::F32, 3)]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::State, "{error}");
}

#[test]
fn absent_gradients_are_averaged_as_zeros() {
    let id = CommId::new(CommKind::Local).unwrap();
    ranks(2, |rank| {
        let ctx = context();
        let comm = Comm::connect(&ctx, &id, rank, 2).unwrap();
        let mut opt = Optimizer::builder(&ctx).data(comm).averages().check_ranks().no_master().build().unwrap();
        opt.add_group(&Sgd { lr: 1.0, ..Default::default() }, &[Param::new("w", Dtype::BF16, 2)]).unwrap();
        let mut w = vec![BF16::from_f32(2.0); 2];
        let (half, full) = (vec![BF16::from_f32(1.0); 2], vec![1.0f32; 2]);
        // Of the dtype of the parameter.
        let own: TensorRef<'_> = if rank == 0 { (&half).into() } else { TensorRef::absent() };
        opt.step(&mut [(&mut w).into()], &[own]).unwrap();
        assert_eq!(w[0].to_f32(), 1.5);
        // Of another one.
        let own = if rank == 0 { (&full).into() } else { TensorRef::absent() };
        let error = opt.step(&mut [(&mut w).into()], &[own]).unwrap_err();
        assert!(error.kind() == ErrorKind::Mismatch && error.text().contains("has dtype"), "{error}");
        let own = if rank == 0 { (&full).into() } else { TensorRef::absent_as(Dtype::F32, 2) };
        opt.step(&mut [(&mut w).into()], &[own]).unwrap();
        assert_eq!(w[0].to_f32(), 1.0);
    });
}
