// SPDX-License-Identifier: Apache-2.0
//! Invalid input, panics in hooks, threads, and objects dropped in any order.
mod support;
use dsopt::{
    AdamW, Applier, Collectives, Comm, CommFailure, Context, Dtype, ErrorKind, Key, Lamb, LoadOptions, LogLevel, Op,
    Optimizer, Param, Reduce, Reset, Scaler, ScalerOptions, Step, TensorMut, TensorRef, Values, BF16, F16,
};
use std::error::Error as _;
use std::io::{self, Cursor, Read, Seek, SeekFrom, Write};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use support::{f32_params, Folder};

fn adam(ctx: &Context, sizes: &[usize]) -> Optimizer {
    let mut opt = Optimizer::new(ctx).unwrap();
    opt.add_group(&AdamW { lr: 0.1, ..Default::default() }, &f32_params(sizes)).unwrap();
    opt
}

#[track_caller]
fn refused<T>(result: dsopt::Result<T>, kind: ErrorKind, text: &str) {
    let error = result.err().expect("an error");
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.text().contains(text), "{error}");
    assert!(error.to_string().starts_with("DSOPT_ERR_"), "{error}");
    assert!(error.status() >= 10);
}

#[test]
fn calls_reject_mismatched_lists() {
    let ctx = Context::cpu().unwrap();
    let mut opt = adam(&ctx, &[3, 2]);
    let (mut a, mut b, ga, gb) = (vec![1.0f32; 3], vec![1.0f32; 2], vec![1.0f32; 3], vec![1.0f32; 2]);
    let (ga, gb) = (TensorRef::from(&ga), TensorRef::from(&gb));
    let list = &mut [TensorMut::from(&mut a), TensorMut::from(&mut b)];
    refused(opt.step(list, &[ga]), ErrorKind::Shape, "gradients has 1 tensors, that of parameters 2");
    refused(opt.step(&mut list[..1], &[ga, gb]), ErrorKind::Shape, "gradients");
    refused(opt.step(&mut list[..1], &[ga]), ErrorKind::Shape, "registered are 2");
    refused(opt.step(&mut [], &[]), ErrorKind::Shape, "registered are 2");
    refused(opt.step(list, &[gb, ga]), ErrorKind::Shape, "gradient of 'p0'");
    let half = vec![F16(0); 3];
    refused(opt.step_with(Step::new(list, &[ga, gb]).out(&mut [])), ErrorKind::Shape, "outputs has 0");
    refused(opt.step_with(Step::new(list, &[ga, gb]).lr(&[0.1, 0.2])), ErrorKind::Shape, "2 learning rates");
    refused(opt.step_with(Step::new(list, &[ga, gb]).grad_norms(&[])), ErrorKind::Shape, "0 gradient norms");
    refused(opt.step_with(Step::new(list, &[ga, gb]).hyper(&[])), ErrorKind::Shape, "0 rows");
    opt.step(list, &[(&half).into(), gb]).unwrap(); // gradients may have another dtype, parameters not:
    let mut half = half;
    refused(opt.step(&mut [(&mut half).into(), (&mut b).into()], &[ga, gb]), ErrorKind::Dtype, "'p0' has dtype F16");
    let words = [1i32, 2, 3];
    let list = &mut [TensorMut::from(&mut a), TensorMut::from(&mut b)];
    refused(opt.step(list, &[(&words).into(), gb]), ErrorKind::Dtype, "I32");
    refused(opt.new_state(&mut list[..1]), ErrorKind::Shape, "1 entries, not 2");
    refused(ctx.axpby(1.0, &[ga], 0.0, &mut []), ErrorKind::Shape, "x has 1 tensors, y 0");
    refused(opt.apply(Step::new(list, &[ga, gb]), &mut [], &mut Vec::new()), ErrorKind::Shape, "state");
    assert_eq!(opt.report().unwrap().calls, 1, "what is refused changes nothing");
}

#[test]
fn calls_reject_invalid_options_names_and_order() {
    let ctx = Context::cpu().unwrap();
    let mut opt = Optimizer::new(&ctx).unwrap();
    let (mut w, g) = (vec![1.0f32], vec![1.0f32]);
    refused(opt.step(&mut [(&mut w).into()], &[(&g).into()]), ErrorKind::State, "no groups");
    refused(opt.add_group(&AdamW { lr: f64::NAN, ..Default::default() }, &[]), ErrorKind::Argument, "lr");
    refused(opt.add_group(&AdamW::default(), &[Param::new("a\0b", Dtype::F32, 1)]), ErrorKind::Argument, "NUL");
    refused(opt.add_group(&AdamW::default(), &[Param::new("", Dtype::F32, 1)]), ErrorKind::Argument, "name");
    let huge = Param::shaped("w", Dtype::F32, &[usize::MAX, usize::MAX]);
    assert!(opt.add_group(&AdamW::default(), &[huge]).is_err());
    let ninth = Param::shaped("w", Dtype::F32, &[1; 9]);
    refused(opt.add_group(&AdamW::default(), &[ninth]), ErrorKind::Argument, "ndim");
    refused(opt.add_group(&AdamW::default(), &[Param::new("w", Dtype::I32, 1)]), ErrorKind::Dtype, "I32");
    opt.add_group(&AdamW::default(), &[]).unwrap();
    opt.add_group(&Lamb::default(), &[Param::new("w", Dtype::F32, 1)]).unwrap();
    refused(opt.add_params(&[Param::new("v", Dtype::F32, 1).group(2)]), ErrorKind::Argument, "group");
    opt.add_params(&[Param::new("v", Dtype::F32, 0).group(0)]).unwrap();
    assert_eq!((opt.groups().unwrap(), opt.params().unwrap()), (2, 2));
    refused(opt.set(Some(2), Key::Lr, 0.1), ErrorKind::Argument, "group");
    refused(opt.set(Some(0), Key::MinTrust, 0.1), ErrorKind::Unsupported, "trust");
    refused(opt.get(Some(usize::MAX), Key::Lr), ErrorKind::Argument, "group");
    opt.set_lr(0.5).unwrap();
    assert_eq!(opt.get(Some(1), Key::Lr).unwrap(), 0.5);
    refused(opt.view(100), ErrorKind::Argument, "index");
    assert_eq!(opt.view(0).unwrap(), None, "no memory before the first step");
    refused(Optimizer::builder(&ctx).max_norm(-1.0).build(), ErrorKind::Argument, "max_norm");
    refused(Context::builder().threads(-1).build(), ErrorKind::Argument, "threads");
    refused(Context::builder().check_pointers().build(), ErrorKind::Unsupported, "CHECK_POINTERS");
    let wrong = ScalerOptions { factor: 0.5, ..Default::default() };
    refused(Scaler::new(&ctx, wrong), ErrorKind::Argument, "factor");
    assert!(dsopt::build_info().unwrap().contains("\"abi\""));
}

#[test]
fn state_is_accessible_before_the_first_step() {
    let ctx = Context::cpu().unwrap();
    let scaler = Scaler::new(&ctx, ScalerOptions { init: 64.0, ..Default::default() }).unwrap();
    let mut opt = Optimizer::builder(&ctx).scaler(&scaler).build().unwrap();
    opt.add_group(&AdamW::default(), &[Param::new("w", Dtype::F16, 2)]).unwrap();
    let master = opt.find_state("master", Some(0)).unwrap().unwrap();
    assert!(opt.state_info(master).unwrap().from_param);
    let mut values = [0.0f32; 2];
    refused(opt.export(master, &mut values), ErrorKind::State, "'w'");
    let mut w = vec![F16::from_f32(1.5), F16::from_f32(-2.0)];
    opt.init(&mut [(&mut w).into()]).unwrap();
    opt.export(master, &mut values).unwrap();
    assert_eq!(values, [1.5, -2.0]);
    refused(opt.export(master, &mut [0.0f32; 3]), ErrorKind::Shape, "12");
    refused(opt.export(master, &mut [0i32; 2]), ErrorKind::Dtype, "has dtype F32, the slice I32");
    opt.import(master, &[3.0f32, 4.0]).unwrap();
    assert_eq!(opt.view(master).unwrap().unwrap().as_f32().unwrap(), [3.0, 4.0]);
    opt.reset(&[Reset::Masters], &[(&w).into()]).unwrap();
    assert_eq!(opt.view(master).unwrap().unwrap().as_f32().unwrap(), [1.5, -2.0]);
    refused(opt.reset(&[Reset::Masters], &[]), ErrorKind::State, "no memory"); // the optimizer keeps no pointer

    // The scaler's memory has no view; its words are copied and decoded.
    let words = opt.find_state("scaler", None).unwrap().unwrap();
    refused(opt.view(words), ErrorKind::Unsupported, "scaler");
    let mut copy = [0i32; 12];
    opt.export(words, &mut copy).unwrap();
    assert_eq!(Scaler::decode(&copy).unwrap().scale, 64.0);
    let (mut scale, mut own) = ([0.0f32], [0i32; 12]);
    scaler.init_state(&mut scale, &mut own).unwrap();
    scaler.update_arrays(&mut scale, &mut own, Some(true)).unwrap();
    assert_eq!((scale, Scaler::decode(&own).unwrap().last_overflow), ([32.0], Some(0)));

    // A second optimizer can use the scaler only after it is detached.
    refused(Optimizer::builder(&ctx).scaler(&scaler).build(), ErrorKind::State, "scaler");
    scaler.detach().unwrap();
    Optimizer::builder(&ctx).scaler(&scaler).build().unwrap();
    let g = [F16(0); 2];
    refused(opt.step(&mut [(&mut w).into()], &[(&g).into()]), ErrorKind::State, "detached");
    scaler.override_scale(Some(2.0)).unwrap();
    assert!(scaler.query().unwrap().overridden && scaler.scale().unwrap() == 2.0);
    scaler.override_scale(None).unwrap();
    scaler.set(8.0).unwrap();
    scaler.update(Some(true)).unwrap();
    assert_eq!(scaler.scale().unwrap(), 4.0);
    let (mut loss, mut half) = ([1.5f32], [F16::from_f32(0.5); 2]);
    scaler.scale_loss(&mut (&mut loss).into()).unwrap();
    scaler.scale_loss(&mut (&mut half[..1]).into()).unwrap();
    assert_eq!((loss, half.map(F16::to_f32)), ([6.0], [2.0, 0.5]));
    refused(scaler.scale_loss(&mut (&mut half).into()), ErrorKind::Shape, "loss");
}

#[test]
fn shared_borrows_are_not_written() {
    // In read-only memory. DeepSpeed's mode decays fp32 parameters when the state is created.
    static WIDE: [f32; 4] = [1.0; 4];
    static HALF: [F16; 4] = [F16(0x3c00); 4];
    let ctx = Context::cpu().unwrap();
    let (params, grads) = ([(&WIDE).into(), (&HALF).into()], [TensorRef::from(&WIDE); 2]);
    let make = |deepspeed: bool| {
        let builder = Optimizer::builder(&ctx);
        let mut opt = if deepspeed { builder.deepspeed() } else { builder }.build().unwrap();
        let list = [Param::new("w", Dtype::F32, 4), Param::new("h", Dtype::F16, 4)];
        opt.add_group(&AdamW { weight_decay: 0.1, ..Default::default() }, &list).unwrap();
        opt
    };
    let (mut wide, mut half) = ([0.0f32; 4], [F16(0); 4]);
    let out = &mut [(&mut wide).into(), (&mut half).into()];
    type Call<'a> = Box<dyn FnMut(&mut Optimizer) -> dsopt::Result<()> + 'a>;
    let mut calls: [Call<'_>; 3] = [
        Box::new(|opt| opt.save_to(Vec::new(), &params)),
        Box::new(|opt| opt.reset(&[Reset::Masters], &params)),
        Box::new(|opt| opt.step_with(Step::out_only(&params, &grads, out))),
    ];
    for call in &mut calls {
        call(&mut make(false)).unwrap();
        let mut opt = make(true);
        refused(call(&mut opt), ErrorKind::State, "call init");
        let (mut wide, mut half) = (WIDE, HALF);
        opt.init(&mut [(&mut wide).into(), (&mut half).into()]).unwrap();
        assert!(wide[0] < 1.0, "init took the step on zero gradients");
        call(&mut opt).unwrap();
    }
}

struct Broken;

impl Write for Broken {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::Error::new(io::ErrorKind::Other, "no paper"))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for Broken {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        panic!("no ink")
    }
}

impl Seek for Broken {
    fn seek(&mut self, _: SeekFrom) -> io::Result<u64> {
        Ok(1000)
    }
}

#[test]
fn save_and_load_use_streams_and_files_and_report_errors() {
    let ctx = Context::cpu().unwrap();
    let folder = Folder::new("streams");
    let mut opt = adam(&ctx, &[3]);
    let (mut w, g) = (vec![1.0f32; 3], vec![1.0f32; 3]);
    opt.step(&mut [(&mut w).into()], &[(&g).into()]).unwrap();
    let mut bytes = Vec::new();
    opt.save_to(&mut bytes, &[(&w).into()]).unwrap();
    opt.save(folder.file("a.safetensors")).unwrap();

    let mut other = adam(&ctx, &[3]);
    let mut v = vec![0.0f32; 3];
    other.load_from(&mut [Cursor::new(&bytes)], LoadOptions::default(), &mut [(&mut v).into()]).unwrap();
    assert_eq!(v, w);
    for (opt, w) in [(&mut opt, &mut w), (&mut other, &mut v)] {
        opt.step(&mut [w.into()], &[(&g).into()]).unwrap();
    }
    assert_eq!(v, w);
    other.load(folder.file("a.safetensors"), LoadOptions { keep_hyper: true, ..Default::default() }).unwrap();

    let error = opt.save_to(Broken, &[]).unwrap_err();
    assert_eq!((error.kind(), error.source().unwrap().to_string()), (ErrorKind::Io, "no paper".to_string()));
    let load = |opt: &mut Optimizer| opt.load_from(&mut [Broken], LoadOptions::default(), &mut []);
    let panic = catch_unwind(AssertUnwindSafe(|| load(&mut other))).unwrap_err();
    assert_eq!(*panic.downcast::<&str>().unwrap(), "no ink");
    refused(opt.load(folder.file("none"), LoadOptions::default()), ErrorKind::Io, "none");
    refused(opt.load("a\0b", LoadOptions::default()), ErrorKind::Argument, "NUL");
    refused(opt.load_files::<&str>(&[], LoadOptions::default(), &mut []), ErrorKind::Argument, "no paths");
    let half = bytes.len() / 2;
    let short = &mut [Cursor::new(&bytes[..half])];
    assert!(opt.load_from(short, LoadOptions::default(), &mut []).is_err());
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    let load = opt.load_from(&mut [Cursor::new(&bytes)], LoadOptions::default(), &mut [(&mut v).into()]);
    refused(load, ErrorKind::Checksum, "p0");
    refused(adam(&ctx, &[4]).load(folder.file("a.safetensors"), LoadOptions::default()), ErrorKind::Mismatch, "p0");
}

#[test]
fn calls_resume_panics_of_hooks() {
    let broken = Arc::new(AtomicBool::new(true));
    let down = broken.clone();
    let pool = move |pieces: usize, run: &(dyn Fn(usize) + Sync)| {
        assert!(!down.load(Ordering::SeqCst), "pool is down");
        thread::scope(|scope| {
            scope.spawn(|| (0..pieces / 2).for_each(run));
            (pieces / 2..pieces).for_each(run);
        });
    };
    let ctx = Context::builder().threads(4).parallel_for(pool).build().unwrap();
    let mut opt = adam(&ctx, &[300_000]);
    let (mut w, g) = (vec![1.0f32; 300_000], vec![1.0f32; 300_000]);
    let mut step = || opt.step(&mut [(&mut w).into()], &[(&g).into()]);
    let panic = catch_unwind(AssertUnwindSafe(&mut step)).unwrap_err();
    assert_eq!(*panic.downcast::<&str>().unwrap(), "pool is down");
    broken.store(false, Ordering::SeqCst);
    step().unwrap(); // the objects stay usable

    // A pool that omits a piece, one that runs a piece twice, and one that runs nonexistent pieces: an error without a
    // panic.
    let pools: [&dsopt::ParallelFor; 3] = [
        &|pieces, run| (1..pieces).for_each(run),
        &|pieces, run| (0..pieces).chain(0..1).for_each(run),
        &|pieces, run| (0..pieces).chain([pieces, usize::MAX]).for_each(run),
    ];
    for pool in pools {
        let mut list = [TensorMut::from(&mut w)];
        let result = opt.step_with(Step::new(&mut list, &[(&g).into()]).parallel_for(pool));
        refused(result, ErrorKind::Hook, "parallel_for");
    }

    // A panic in a piece on the pool's own thread also reaches the caller.
    let pool = |pieces: usize, run: &(dyn Fn(usize) + Sync)| {
        (0..pieces).for_each(run);
        thread::scope(|scope| scope.spawn(|| panic!("in a worker")).join()).unwrap_err();
        panic!("after the work");
    };
    let mut list = [TensorMut::from(&mut w)];
    let grads = [TensorRef::from(&g)];
    let step = Step::new(&mut list, &grads).parallel_for(&pool);
    let panic = catch_unwind(AssertUnwindSafe(|| opt.step_with(step))).unwrap_err();
    assert_eq!(*panic.downcast::<&str>().unwrap(), "after the work");
}

/// The destructor of an optimizer also runs hooks. If it runs inside a hook, the panic of that hook's call must be
/// kept.
#[test]
fn drop_in_a_hook_keeps_the_panic_of_the_call() {
    struct First(Mutex<Option<Comm>>);
    impl Collectives for First {
        fn all_reduce(&self, _: Values<'_>, _: Reduce) -> Result<(), CommFailure> {
            panic!("the first");
        }
        fn error(&self) -> Option<String> {
            drop(self.0.lock().unwrap().take()); // after the panic, in the same call
            None
        }
    }
    let ctx = Context::cpu().unwrap();
    let inner = Comm::single(&ctx).unwrap();
    let mut comm = Comm::table(&ctx, 0, 2, First(Mutex::new(Some(inner)))).unwrap();
    let mut x = [1.0f32];
    let panic = catch_unwind(AssertUnwindSafe(|| comm.all_reduce(&mut [(&mut x).into()], Op::Sum))).unwrap_err();
    assert_eq!(*panic.downcast::<&str>().unwrap(), "the first");
}

/// A hook that runs after a panic in the same call may use another optimizer. That call works and unbinds its memory.
#[test]
fn hooks_may_call_other_optimizers_after_a_panic() {
    const LENGTH: usize = 5000;
    struct Gloo {
        other: Arc<Mutex<Optimizer>>,
        weights: Vec<BF16>,
        reset: Arc<Mutex<Option<dsopt::Result<()>>>>,
    }
    impl Collectives for Gloo {
        fn all_reduce(&self, _: Values<'_>, _: Reduce) -> Result<(), CommFailure> {
            panic!("connection lost");
        }
        fn error(&self) -> Option<String> {
            let result = self.other.lock().unwrap().reset(&[Reset::Masters], &[(&self.weights).into()]);
            *self.reset.lock().unwrap() = Some(result);
            None
        }
    }
    let ctx = Context::cpu().unwrap();
    let mut other = Optimizer::new(&ctx).unwrap();
    other.add_group(&AdamW::default(), &[Param::new("w", Dtype::BF16, LENGTH)]).unwrap();
    let (mut w, g) = (vec![BF16::from_f32(1.0); LENGTH], vec![0.0f32; LENGTH]);
    other.step(&mut [(&mut w).into()], &[(&g).into()]).unwrap();
    let (other, reset) = (Arc::new(Mutex::new(other)), Arc::new(Mutex::new(None)));
    let gloo = Gloo { other: other.clone(), weights: vec![BF16::from_f32(1.5); LENGTH], reset: reset.clone() };
    let comm = Comm::table(&ctx, 0, 2, gloo).unwrap();
    let mut opt = Optimizer::builder(&ctx).data(comm).max_norm(1.0).build().unwrap();
    opt.add_group(&AdamW::default(), &[Param::new("v", Dtype::F32, 3)]).unwrap();
    let (mut v, gv) = (vec![1.0f32; 3], vec![0.5f32; 3]);
    let step = AssertUnwindSafe(|| opt.step(&mut [(&mut v).into()], &[(&gv).into()]));
    let panic = catch_unwind(step).unwrap_err();
    assert_eq!(*panic.downcast::<&str>().unwrap(), "connection lost");
    reset.lock().unwrap().take().expect("the hook came back").unwrap();
    let mut other = other.lock().unwrap();
    refused(other.reset(&[Reset::Masters], &[]), ErrorKind::State, "no memory");
}

#[test]
fn log_hook_receives_lines_and_may_panic() {
    let lines = Arc::new(Mutex::new(Vec::new()));
    for panics in [false, true] {
        let kept = lines.clone();
        let log = move |level, text: &str| {
            kept.lock().unwrap().push((level, text.to_string()));
            assert!(!panics, "the disk is full");
        };
        let build = || Context::builder().log_level(LogLevel::Info).log(log).build().map(drop);
        let result = catch_unwind(AssertUnwindSafe(build));
        assert_eq!(result.is_err(), panics);
    }
    assert_eq!(Arc::strong_count(&lines), 1, "the hooks of both are dropped");
    let lines = lines.lock().unwrap();
    assert_eq!(lines.len(), 2);
    assert!(lines.iter().all(|(level, text)| *level == LogLevel::Info && text.contains("dsopt")), "{lines:?}");
}

#[test]
fn appliers_run_in_threads_next_to_their_optimizer() {
    let ctx = Context::builder().threads(1).build().unwrap();
    let mut opt = adam(&ctx, &[100]);
    let applier: Applier = opt.applier().unwrap();
    refused(opt.add_params(&[Param::new("v", Dtype::F32, 1)]), ErrorKind::State, "applier");
    refused(opt.add_group(&AdamW::default(), &[]), ErrorKind::State, "applier");
    let busy = AtomicUsize::new(0);
    let run = |applier: Applier| {
        let mut w = vec![1.0f32; 100];
        let g = vec![0.5f32; 100];
        let (mut m, mut v, mut t) = (vec![9.0f32; 100], vec![9.0f32; 100], [9i32]);
        let retry = |result: dsopt::Result<()>| match result {
            Err(error) if error.kind() == ErrorKind::Busy => {
                busy.fetch_add(1, Ordering::Relaxed);
                thread::yield_now();
                false
            }
            result => {
                result.unwrap();
                true
            }
        };
        let (mut workspace, mut done) = (Vec::new(), 0);
        while done < 101 {
            let mut state = [TensorMut::from(&mut m), TensorMut::from(&mut v), TensorMut::from(&mut t)];
            let mut list = [TensorMut::from(&mut w)];
            done += usize::from(retry(match done {
                0 => applier.init_state(&mut list, &mut state),
                _ => applier.apply(Step::new(&mut list, &[(&g).into()]), &mut state, &mut workspace),
            }));
        }
        (w, t)
    };
    let results: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..3).map(|_| scope.spawn(|| run(applier.clone()))).collect();
        for _ in 0..100 {
            // Concurrent with the appliers; rejected while one of them is in a call.
            match opt.set_lr(0.1) {
                Err(error) => assert_eq!(error.kind(), ErrorKind::Busy),
                Ok(()) => assert_eq!(opt.get(None, Key::Lr).unwrap(), 0.1),
            }
        }
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(results.iter().all(|result| *result == results[0]));
    assert_eq!(results[0].1, [100]);
    drop(opt);
    drop(ctx);
    assert_eq!(run(applier), results[0], "an applier keeps what it needs");
}

#[test]
fn objects_can_be_dropped_in_any_order_or_leaked() {
    for order in 0..6 {
        let ctx = Context::builder().log(|_, _| ()).build().unwrap();
        let scaler = Scaler::new(&ctx, ScalerOptions::default()).unwrap();
        let mut opt = Optimizer::builder(&ctx).scaler(&scaler).build().unwrap();
        opt.add_group(&AdamW::default(), &f32_params(&[3])).unwrap();
        let (mut w, g) = (vec![1.0f32; 3], vec![1.0f32; 3]);
        match order {
            0 => drop((ctx, scaler)),
            1 => drop((scaler, ctx)),
            2 => std::mem::forget((ctx, scaler)),
            3 => drop(ctx),
            4 => thread::spawn(move || drop((scaler, ctx))).join().unwrap(),
            _ => {
                drop(opt);
                assert_eq!(scaler.scale().unwrap(), 65536.0);
                drop(scaler);
                continue;
            }
        }
        // Moved to another thread, and used and dropped there.
        thread::spawn(move || opt.step(&mut [(&mut w).into()], &[(&g).into()])).join().unwrap().unwrap();
    }
    let ctx = Context::cpu().unwrap();
    std::mem::forget(adam(&ctx, &[3]));
    let mut w = vec![1.0f32; 3];
    let mut list = [TensorMut::from(&mut w)];
    let mut state = adam(&ctx, &[3]).new_state(&mut list).unwrap();
    std::mem::forget(state.iter_mut().map(dsopt::Array::as_tensor_mut).collect::<Vec<_>>());
    drop(state);
}

#[test]
fn scaler_is_shared_by_optimizers_in_several_threads() {
    let ctx = Context::builder().threads(1).build().unwrap();
    let scaler = Scaler::new(&ctx, ScalerOptions { shared: true, init: 8.0, ..Default::default() }).unwrap();
    thread::scope(|scope| {
        for thread in 0..3 {
            let (ctx, scaler) = (ctx.clone(), scaler.clone());
            scope.spawn(move || {
                let mut opt = Optimizer::builder(&ctx).scaler(&scaler).build().unwrap();
                opt.add_group(&AdamW::default(), &f32_params(&[50])).unwrap();
                let (mut w, mut g) = (vec![1.0f32; 50], vec![1.0f32; 50]);
                g[7] = if thread == 1 { f32::INFINITY } else { 1.0 };
                for _ in 0..100 {
                    opt.step(&mut [(&mut w).into()], &[(&g).into()]).unwrap();
                    assert_eq!(scaler.query().unwrap().scale, 8.0);
                }
                assert_eq!(opt.report().unwrap().skipped, if thread == 1 { 100 } else { 0 });
            });
        }
    });
    scaler.update(None).unwrap();
    assert_eq!(scaler.scale().unwrap(), 4.0, "one of them recorded an overflow");
}

#[test]
fn reentrant_call_from_a_hook_fails_without_deadlock() {
    let seen = Arc::new(Mutex::new(None));
    let (kept, slot) = (seen.clone(), Arc::new(Mutex::new(None::<Scaler>)));
    let inside = slot.clone();
    let pool = move |pieces: usize, run: &(dyn Fn(usize) + Sync)| {
        (0..pieces).for_each(run);
        if let Some(scaler) = &*inside.lock().unwrap() {
            *kept.lock().unwrap() = Some(scaler.query().map_err(|error| error.kind()));
        }
    };
    let ctx = Context::builder().threads(2).parallel_for(pool).build().unwrap();
    let scaler = Scaler::new(&ctx, ScalerOptions::default()).unwrap();
    *slot.lock().unwrap() = Some(scaler.clone());
    let mut opt = Optimizer::builder(&ctx).scaler(&scaler).build().unwrap();
    opt.add_group(&AdamW::default(), &f32_params(&[300_000])).unwrap();
    let (mut w, g) = (vec![1.0f32; 300_000], vec![1.0f32; 300_000]);
    opt.step(&mut [(&mut w).into()], &[(&g).into()]).unwrap();
    assert_eq!(*seen.lock().unwrap(), Some(Err(ErrorKind::Busy)));
    *slot.lock().unwrap() = None; // breaks the reference cycle of the context
}
