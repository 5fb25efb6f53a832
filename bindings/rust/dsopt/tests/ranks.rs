// SPDX-License-Identifier: Apache-2.0
//! Ranks on threads: 1-bit Adam, checkpoints of other numbers of ranks, the program's own collectives, failures.
mod support;
use dsopt::{
    AdamW, Collectives, Comm, CommFailure, CommId, CommKind, Compressed, Context, Dtype, ErrorKind, LoadOptions, Norm,
    OneBitAdam, Op, Optimizer, Param, Reduce, Reduction, Sgd, TensorMut, TensorRef, Values,
};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::{Arc, Barrier, Condvar, Mutex};
use std::thread;
use std::time::Duration;
use support::{context, ranks, Folder, Random};

const SIZES: [usize; 2] = [5, 130];

fn onebit(comm: Comm, ctx: &Context) -> Optimizer {
    let mut opt = Optimizer::builder(ctx).data(comm).build().unwrap();
    let group = OneBitAdam { lr: 0.01, freeze_step: 5, ..Default::default() };
    opt.add_group(&group, &support::f32_params(&SIZES)).unwrap();
    opt
}

fn start() -> Vec<Vec<f32>> {
    let mut random = Random(54321);
    SIZES.iter().map(|&size| random.vec(size)).collect()
}

/// Steps on gradients that depend only on step and rank. The caller averages them while required.
fn train(opt: &mut Optimizer, p: &mut [Vec<f32>], rank: usize, steps: std::ops::Range<u32>) -> Vec<Reduction> {
    let mut seen = Vec::new();
    for step in steps {
        let mut random = Random(step * 100 + rank as u32);
        let mut grads: Vec<Vec<f32>> = SIZES.iter().map(|&size| random.vec(size)).collect();
        let reduction = opt.next_reduction().unwrap();
        assert_eq!(reduction, opt.reduction_at(step + 1).unwrap());
        if reduction == Reduction::Full {
            let mut list: Vec<TensorMut<'_>> = grads.iter_mut().map(TensorMut::from).collect();
            opt.all_reduce(&mut list, Op::Mean).unwrap();
        }
        let grads: Vec<TensorRef<'_>> = grads.iter().map(TensorRef::from).collect();
        opt.step(&mut p.iter_mut().map(TensorMut::from).collect::<Vec<_>>(), &grads).unwrap();
        seen.push(reduction);
    }
    seen
}

#[test]
fn onebit_adam_saves_resumes_and_reshards() {
    let folder = Folder::new("reshard");
    let file = |rank: usize| folder.file(&format!("rank{rank}.safetensors"));
    let id = CommId::new(CommKind::Local).unwrap();
    let uninterrupted = ranks(2, |rank| {
        let ctx = context();
        let comm = Comm::connect(&ctx, &id, rank, 2).unwrap();
        let handle = comm.handle();
        let mut opt = onebit(comm, &ctx);
        let mut p = start();
        let seen = train(&mut opt, &mut p, rank, 0..8);
        assert_eq!(seen[..5], [Reduction::Full; 5]);
        assert_eq!(seen[5..], [Reduction::Compressed; 3]);
        let list: Vec<TensorRef<'_>> = p.iter().map(TensorRef::from).collect();
        opt.save_params(file(rank), &list).unwrap();
        let words: [i32; 8] = {
            let index = opt.find_state("schedule", None).unwrap().unwrap();
            opt.view(index).unwrap().unwrap().as_i32().unwrap().try_into().unwrap()
        };
        let schedule = opt.decode_schedule(&words).unwrap();
        assert_eq!((schedule.step, schedule.frozen), (8, true));
        assert_eq!(opt.reduction_of(Some(&words)).unwrap(), Reduction::Compressed);
        assert_eq!(opt.reduction_of(Some(&[0; 8])).unwrap(), Reduction::Full);
        assert_eq!(opt.reduction_of(None).unwrap_err().kind(), ErrorKind::Argument);
        train(&mut opt, &mut p, rank, 8..12);
        let info = handle.query().unwrap();
        assert!(info.ranks == 2 && info.rank == rank && info.status == 0 && info.bytes_sent > 0);
        p
    });
    assert_eq!(uninterrupted[0], uninterrupted[1], "replicas");

    // The same number of ranks resumes with the same bits.
    let id = CommId::from_bytes(CommKind::Local, CommId::new(CommKind::Local).unwrap().as_bytes());
    let resumed = ranks(2, |rank| {
        let ctx = context();
        let mut opt = onebit(Comm::connect(&ctx, &id, rank, 2).unwrap(), &ctx);
        let mut p: Vec<Vec<f32>> = SIZES.iter().map(|&size| vec![0.0; size]).collect();
        let mut list: Vec<TensorMut<'_>> = p.iter_mut().map(TensorMut::from).collect();
        opt.load_files(&[file(rank)], LoadOptions::default(), &mut list).unwrap();
        drop(list);
        train(&mut opt, &mut p, rank, 8..12);
        p
    });
    assert_eq!(resumed, uninterrupted);

    // One rank and three ranks load the files of both, from paths or from memory.
    for count in [1, 3] {
        let id = CommId::new(CommKind::Local).unwrap();
        let resharded = ranks(count, |rank| {
            let ctx = context();
            let mut opt = onebit(Comm::connect(&ctx, &id, rank, count).unwrap(), &ctx);
            let mut p: Vec<Vec<f32>> = SIZES.iter().map(|&size| vec![0.0; size]).collect();
            let mut list: Vec<TensorMut<'_>> = p.iter_mut().map(TensorMut::from).collect();
            if count == 1 {
                opt.load_files(&[file(0), file(1)], LoadOptions::default(), &mut list).unwrap();
            } else {
                let mut streams = [1, 0].map(|rank| std::io::Cursor::new(std::fs::read(file(rank)).unwrap()));
                opt.load_from(&mut streams, LoadOptions::default(), &mut list).unwrap();
            }
            drop(list);
            assert_eq!(opt.report().unwrap().resharded_from, 2);
            train(&mut opt, &mut p, rank, 8..12);
            p
        });
        assert!(resharded.iter().all(|p| *p == resharded[0]), "replicas");
    }
}

/// All-reduce through a shared sum: collectives as a program would implement them.
struct Shared {
    state: Mutex<(usize, usize, Vec<f64>, Vec<f64>)>, // arrived, round, sum so far, last result
    changed: Condvar,
    ranks: usize,
}

struct Member {
    shared: Arc<Shared>,
    rank: usize,
    scattered: Arc<Mutex<usize>>,
    dropped: Arc<Mutex<usize>>,
    panics: bool,
}

impl Drop for Member {
    fn drop(&mut self) {
        *self.dropped.lock().unwrap() += 1;
    }
}

impl Collectives for Member {
    fn all_reduce(&self, values: Values<'_>, op: Reduce) -> Result<(), CommFailure> {
        assert!(!self.panics, "the network is down");
        let mine: Vec<f64> = match &values {
            Values::F32(values) => values.iter().map(|&value| f64::from(value)).collect(),
            Values::F64(values) => values.to_vec(),
            Values::I32(values) => values.iter().map(|&value| f64::from(value)).collect(),
            _ => return Err(CommFailure::Failed),
        };
        let mut state = self.shared.state.lock().unwrap();
        if state.0 == 0 {
            state.2 = mine;
        } else {
            for (sum, mine) in state.2.iter_mut().zip(mine) {
                *sum = if op == Reduce::Sum { *sum + mine } else { sum.max(mine) };
            }
        }
        state.0 += 1;
        let round = state.1;
        if state.0 == self.shared.ranks {
            *state = (0, round + 1, Vec::new(), std::mem::take(&mut state.2));
            self.shared.changed.notify_all();
        } else {
            while state.1 == round {
                state = self.shared.changed.wait(state).unwrap();
            }
        }
        match values {
            Values::F32(values) => values.iter_mut().zip(&state.3).for_each(|(to, &from)| *to = from as f32),
            Values::F64(values) => values.copy_from_slice(&state.3),
            Values::I32(values) => values.iter_mut().zip(&state.3).for_each(|(to, &from)| *to = from as i32),
            _ => return Err(CommFailure::Failed),
        }
        Ok(())
    }

    const REDUCE_SCATTER: bool = true;

    fn reduce_scatter(&self, send: &[f32], receive: &mut [f32]) -> Result<(), CommFailure> {
        let mut sums = send.to_vec();
        self.all_reduce(Values::F32(&mut sums), Reduce::Sum)?;
        let length = receive.len();
        receive.copy_from_slice(&sums[self.rank * length..(self.rank + 1) * length]);
        *self.scattered.lock().unwrap() += 1;
        Ok(())
    }

    fn error(&self) -> Option<String> {
        self.panics.then(|| "cable".to_string())
    }
}

fn members(count: usize, panics: bool) -> (Vec<Mutex<Option<Member>>>, Arc<Mutex<usize>>) {
    let state = Mutex::new((0, 0, Vec::new(), Vec::new()));
    let shared = Arc::new(Shared { state, changed: Condvar::new(), ranks: count });
    let dropped = Arc::new(Mutex::new(0));
    let scattered = Arc::new(Mutex::new(0));
    let member = |rank| {
        let (shared, scattered, dropped) = (shared.clone(), scattered.clone(), dropped.clone());
        Mutex::new(Some(Member { shared, rank, scattered, dropped, panics }))
    };
    ((0..count).map(member).collect(), dropped)
}

/// Compares a training on the program's collectives with one on a local comm.
fn assert_same_bits_as_local_comm<T: Collectives>(collectives: &[Mutex<Option<T>>]) {
    let id = CommId::new(CommKind::Local).unwrap();
    let run = |table: bool| {
        ranks(2, |rank| {
            let ctx = context();
            let comm = if table {
                Comm::table(&ctx, rank, 2, collectives[rank].lock().unwrap().take().unwrap()).unwrap()
            } else {
                Comm::connect(&ctx, &id, rank, 2).unwrap()
            };
            let mut opt = onebit(comm, &ctx);
            let mut p = start();
            train(&mut opt, &mut p, rank, 0..9);
            p
        })
    };
    assert_eq!(run(false), run(true));
}

#[test]
fn table_comm_gives_same_bits_as_local_comm() {
    let (collectives, dropped) = members(2, false);
    assert_same_bits_as_local_comm(&collectives);
    assert_eq!(*dropped.lock().unwrap(), 2, "collectives are dropped with their comm, once");
}

/// A member with all_to_all and all_gather, on messages that ranks leave for one another.
struct Mesh {
    rank: usize,
    messages: Arc<Mutex<Vec<Vec<u8>>>>,
    barrier: Arc<Barrier>,
    calls: Arc<Mutex<[usize; 2]>>,
}

/// One of each rank, to be taken by it.
type Meshes = Vec<Mutex<Option<Mesh>>>;

impl Mesh {
    fn of(count: usize) -> (Meshes, Arc<Mutex<[usize; 2]>>) {
        let messages = Arc::new(Mutex::new(vec![Vec::new(); count]));
        let (barrier, calls) = (Arc::new(Barrier::new(count)), Arc::new(Mutex::new([0; 2])));
        let mesh = |rank| {
            let (messages, barrier, calls) = (messages.clone(), barrier.clone(), calls.clone());
            Mutex::new(Some(Mesh { rank, messages, barrier, calls }))
        };
        ((0..count).map(mesh).collect(), calls.clone())
    }

    /// Returns what every rank gives.
    fn exchange(&self, mine: &[u8]) -> Vec<Vec<u8>> {
        self.messages.lock().unwrap()[self.rank] = mine.to_vec();
        self.barrier.wait();
        let all = self.messages.lock().unwrap().clone();
        self.barrier.wait();
        all
    }
}

impl Collectives for Mesh {
    const ALL_TO_ALL: bool = true;
    const ALL_GATHER: bool = true;

    fn all_reduce(&self, values: Values<'_>, op: Reduce) -> Result<(), CommFailure> {
        let as_doubles = |bytes: Vec<u8>| -> Vec<f64> {
            bytes.chunks(8).map(|eight| f64::from_le_bytes(eight.try_into().unwrap())).collect()
        };
        let reduced = |mine: Vec<f64>| -> Vec<f64> {
            let bytes: Vec<u8> = mine.iter().flat_map(|value| value.to_le_bytes()).collect();
            let mut ranks = self.exchange(&bytes).into_iter().map(as_doubles);
            let first = ranks.next().unwrap();
            let combine = |a: f64, b: f64| if op == Reduce::Sum { a + b } else { a.max(b) };
            ranks.fold(first, |all, one| all.into_iter().zip(one).map(|(a, b)| combine(a, b)).collect())
        };
        match values {
            Values::F32(own) => {
                let new = reduced(own.iter().map(|&value| f64::from(value)).collect());
                own.iter_mut().zip(new).for_each(|(value, new)| *value = new as f32);
            }
            Values::F64(own) => {
                let new = reduced(own.to_vec());
                own.copy_from_slice(&new);
            }
            Values::I32(own) => {
                let new = reduced(own.iter().map(|&value| f64::from(value)).collect());
                own.iter_mut().zip(new).for_each(|(value, new)| *value = new as i32);
            }
            _ => return Err(CommFailure::Failed),
        }
        Ok(())
    }

    fn all_to_all(&self, send: &[u8], receive: &mut [u8]) -> Result<(), CommFailure> {
        let length = send.len() / self.messages.lock().unwrap().len();
        self.calls.lock().unwrap()[0] += 1;
        assert_eq!(receive.len(), send.len(), "a message per rank");
        for (message, from) in receive.chunks_mut(length).zip(self.exchange(send)) {
            message.copy_from_slice(&from[self.rank * length..][..length]);
        }
        Ok(())
    }

    fn all_gather(&self, send: &[u8], receive: &mut [u8]) -> Result<(), CommFailure> {
        self.calls.lock().unwrap()[1] += 1;
        assert_eq!(receive.len(), send.len() * self.messages.lock().unwrap().len(), "a message per rank");
        receive.copy_from_slice(&self.exchange(send).concat());
        Ok(())
    }
}

#[test]
fn all_collectives_give_same_bits_as_local_comm() {
    let (collectives, calls) = Mesh::of(2);
    assert_same_bits_as_local_comm(&collectives);
    let [to_all, gathered] = *calls.lock().unwrap();
    assert!(to_all > 0 && gathered > 0, "{to_all} and {gathered} calls");
}

#[test]
fn provider_sums_are_those_of_reduce_scatter() {
    let (collectives, _) = members(2, false);
    let weights = ranks(2, |rank| {
        let ctx = context();
        let member = collectives[rank].lock().unwrap().take().unwrap();
        let scattered = member.scattered.clone();
        let comm = Comm::table_summing(&ctx, rank, 2, member).unwrap();
        let mut opt = Optimizer::builder(&ctx).data(comm).averages().build().unwrap();
        opt.add_group(&Sgd { lr: 1.0, ..Default::default() }, &[Param::new("w", Dtype::F32, 2)]).unwrap();
        let (mut w, g) = (vec![1.0f32, 2.0], vec![0.5 + rank as f32, 1.0]);
        opt.step(&mut [(&mut w).into()], &[(&g).into()]).unwrap();
        assert!(*scattered.lock().unwrap() > 0);
        w
    });
    assert_eq!(weights, [[0.0, 1.0], [0.0, 1.0]]);

    struct Plain;
    impl Collectives for Plain {
        fn all_reduce(&self, _: Values<'_>, _: Reduce) -> Result<(), CommFailure> {
            Ok(())
        }
    }
    let ctx = context();
    let error = Comm::table_summing(&ctx, 0, 2, Plain).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.text().contains("reduce_scatter is NULL"), "{error}");
    let id = CommId::new(CommKind::Local).unwrap();
    let error = Comm::connect_summing(&ctx, &id, 0, 1, Duration::from_secs(1)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
}

#[test]
fn all_reduce_resumes_a_panic_of_the_collectives() {
    let (collectives, dropped) = members(2, true);
    let ctx = context();
    let mut comm = Comm::table(&ctx, 0, 2, collectives[0].lock().unwrap().take().unwrap()).unwrap();
    let mut x = vec![1.0f32; 3];
    let panic = catch_unwind(AssertUnwindSafe(|| comm.all_reduce(&mut [(&mut x).into()], Op::Sum))).unwrap_err();
    assert_eq!(*panic.downcast::<&str>().unwrap(), "the network is down");
    // The comm is unusable, and returns an error without a panic.
    let error = comm.all_reduce(&mut [(&mut x).into()], Op::Sum).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Comm, "{error}");
    let handle = comm.handle();
    drop(comm);
    assert_eq!(*dropped.lock().unwrap(), 0, "a handle keeps it");
    assert_eq!(handle.query().unwrap().status, error.status());
    drop(handle);
    assert_eq!(*dropped.lock().unwrap(), 1);

    let error = Comm::table(&ctx, 2, 2, collectives[1].lock().unwrap().take().unwrap()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Argument, "{error}");
    assert_eq!(*dropped.lock().unwrap(), 2, "what is refused is dropped");
}

#[test]
fn connect_times_out_and_abort_ends_a_blocked_rank() {
    let id = CommId::new(CommKind::Local).unwrap();
    let ctx = context();
    let error = Comm::connect_within(&ctx, &id, 0, 2, Duration::from_millis(20)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");

    let id = CommId::new(CommKind::Local).unwrap();
    let handles = Mutex::new(Vec::new());
    let errors = ranks(2, |rank| {
        let ctx = context();
        let mut comm = Comm::connect(&ctx, &id, rank, 2).unwrap();
        if rank == 1 {
            // A third thread aborts through a handle; this rank never calls the collective.
            let handle = comm.handle();
            thread::spawn(move || handle.abort()).join().unwrap();
            handles.lock().unwrap().push(comm); // not dropped before the other rank is done
            return None;
        }
        Some(comm.all_reduce(&mut [(&mut vec![1.0f32]).into()], Op::Sum).unwrap_err().kind())
    });
    assert_eq!(errors, [Some(ErrorKind::Aborted), None]);
}

#[test]
fn norms_and_compressed_means_span_ranks() {
    let id = CommId::new(CommKind::Local).unwrap();
    let results = ranks(2, |rank| {
        let ctx = context();
        let mut comm = Comm::connect(&ctx, &id, rank, 2).unwrap();
        let x = vec![3.0f32 + rank as f32];
        let norm = ctx.norm(&[(&x).into()], Norm::L2, 1.0, Some(&mut comm)).unwrap();
        assert_eq!((norm.norm, norm.nonfinite, norm.first_bad), (5.0, 0, None));

        let mut exchange = Compressed::new();
        let mut sums = vec![0.0f32; 40];
        for step in 0..200 {
            let mut x: Vec<f32> = (0..40).map(|i| (i % 7) as f32 - 3.0 + rank as f32).collect();
            exchange.all_reduce(&mut comm, None, &mut [(&mut x).into()]).unwrap();
            sums.iter_mut().zip(&x).for_each(|(sum, x)| *sum += x);
            if step == 0 {
                let errors = exchange.errors(&mut comm, None, &mut [(&mut x).into()]).unwrap();
                assert!(errors.worker.len() >= 40 && errors.server.len() * 2 == errors.worker.len());
                assert!(errors.worker.iter().any(|&owed| owed != 0.0));
            }
        }
        // Residuals are added to later messages: the mean of the results is the mean of the inputs.
        for (i, sum) in sums.iter().enumerate() {
            assert!((sum / 200.0 - ((i % 7) as f32 - 2.5)).abs() < 0.2, "{i}: {}", sum / 200.0);
        }
        for other in [300, 5000] {
            let error = exchange.all_reduce(&mut comm, None, &mut [(&mut vec![0.0f32; other]).into()]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Shape, "{error}");
        }
        sums
    });
    assert_eq!(results[0], results[1]);
}

#[test]
fn apply_works_with_comms_and_applier_is_unsupported() {
    let ctx = context();
    let mut opt = Optimizer::builder(&ctx).data(Comm::single(&ctx).unwrap()).build().unwrap();
    opt.add_group(&AdamW::default(), &[Param::new("w", Dtype::F32, 2)]).unwrap();
    assert_eq!(opt.applier().unwrap_err().kind(), ErrorKind::Unsupported);
    assert_eq!(opt.data_comm().unwrap().query().unwrap().ranks, 1);
    let mut w = vec![1.0f32; 2];
    let mut state = opt.new_state(&mut [(&mut w).into()]).unwrap();
    let mut state: Vec<TensorMut<'_>> = state.iter_mut().map(dsopt::Array::as_tensor_mut).collect();
    let (mut list, g) = ([TensorMut::from(&mut w)], vec![1.0f32; 2]);
    opt.apply(dsopt::Step::new(&mut list, &[(&g).into()]), &mut state, &mut Vec::new()).unwrap();
    assert!(w[0] < 1.0);
}
