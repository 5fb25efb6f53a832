// SPDX-License-Identifier: Apache-2.0
//! Sharded state and averages over ranks on threads: the bits of optimizers without them.
mod support;
use dsopt::{
    AdamW, Comm, CommId, CommKind, Dtype, ErrorKind, OneBitAdam, Optimizer, OptimizerBuilder, Param, Sgd, Shard, Step,
    TensorMut, TensorRef, ZeroOneAdam, BF16,
};
use support::{context, f32_params, ranks, Random};

const SIZES: [usize; 4] = [5, 0, 9000, 130];
const RANKS: usize = 3;

#[derive(Clone, Copy)]
enum Gradients {
    /// The same on all ranks.
    Same,
    /// Of the rank, and averaged by the step. One is absent on rank 1.
    Own,
}

/// Trains on this number of ranks. Returns their weights, and what `look` returns.
fn train<R: Send>(
    count: usize,
    shard: Option<Shard>,
    gradients: Gradients,
    look: impl Fn(usize, &Optimizer) -> R + Sync,
) -> (Vec<Vec<f32>>, Vec<R>) {
    let id = CommId::new(CommKind::Local).unwrap();
    let results = ranks(count, |rank| {
        let ctx = context();
        let comm = Comm::connect(&ctx, &id, rank, count).unwrap();
        let mut builder: OptimizerBuilder = Optimizer::builder(&ctx).max_norm(1.0);
        builder = if shard == Some(Shard::Node) { builder.node(comm) } else { builder.data(comm) };
        if let Some(over) = shard {
            builder = builder.shard(over);
        }
        if let Gradients::Own = gradients {
            builder = builder.averages();
        }
        let mut opt = builder.build().unwrap();
        opt.add_group(&AdamW { lr: 0.01, ..Default::default() }, &f32_params(&SIZES)).unwrap();
        let mut random = Random(54321);
        let mut p: Vec<Vec<f32>> = SIZES.iter().map(|&size| random.vec(size)).collect();
        for step in 0..4 {
            let mut random = Random(match gradients {
                Gradients::Same => 100 * step,
                Gradients::Own => 100 * step + 1 + rank as u32,
            });
            let grads: Vec<Vec<f32>> = SIZES.iter().map(|&size| random.vec(size)).collect();
            let mut grads: Vec<TensorRef<'_>> = grads.iter().map(TensorRef::from).collect();
            if rank == 1 && matches!(gradients, Gradients::Own) {
                grads[2] = TensorRef::absent();
            }
            opt.step(&mut p.iter_mut().map(TensorMut::from).collect::<Vec<_>>(), &grads).unwrap();
        }
        let found = look(rank, &opt);
        (p, found)
    });
    assert!(results.iter().all(|(p, _)| *p == results[0].0), "replicas");
    let weights = results[0].0.clone();
    (weights, results.into_iter().map(|(_, found)| found).collect())
}

#[test]
fn weights_have_the_bits_of_one_rank() {
    let (expected, _) = train(1, None, Gradients::Same, |_, _| ());
    for over in [Shard::Data, Shard::Node] {
        for count in [1, 2, RANKS] {
            assert!(train(count, Some(over), Gradients::Same, |_, _| ()).0 == expected, "{over:?}, {count} ranks");
        }
    }
}

#[test]
fn averages_have_the_same_bits_with_and_without_shard() {
    let (expected, _) = train(RANKS, None, Gradients::Own, |_, _| ());
    for over in [Shard::Data, Shard::Node] {
        assert!(train(RANKS, Some(over), Gradients::Own, |_, _| ()).0 == expected, "{over:?}");
    }
}

#[test]
fn parts_tile_and_state_is_the_part_of_the_rank() {
    train(RANKS, Some(Shard::Data), Gradients::Same, |rank, opt| {
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
    });
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
