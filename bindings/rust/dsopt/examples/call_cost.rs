// SPDX-License-Identifier: Apache-2.0
//! call_cost [STEPS]: microseconds per step of AdamW over 148 tensors of 4 elements, measured as in bench/call_cost.c.
//! Alternates between four variants: the C function on bound parameters; the C function with parameters in the call, as
//! this crate uses it; this crate with lists created in advance; and this crate with lists created for each step.
use dsopt::{sys, AdamW, Context, Dtype, Optimizer, Param, Result, TensorMut, TensorRef};
use std::time::Instant;

const TENSORS: usize = 148;
const NUMEL: usize = 4;
const WARM_UP: usize = 100;

struct Model {
    opt: Optimizer,
    weights: Vec<Vec<f32>>,
    grads: Vec<Vec<f32>>,
}

impl Model {
    fn new(ctx: &Context) -> Result<Model> {
        let mut opt = Optimizer::new(ctx)?;
        let params: Vec<_> = (0..TENSORS).map(|index| Param::new(format!("p{index}"), Dtype::F32, NUMEL)).collect();
        opt.add_group(&AdamW::default(), &params)?;
        let grads = (0..TENSORS).map(|_| (1..=NUMEL).map(|k| 0.01 * k as f32).collect()).collect();
        Ok(Model { opt, weights: vec![vec![0.0; NUMEL]; TENSORS], grads })
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn timed(times: &mut Vec<f64>, step: &mut dyn FnMut() -> Result<()>) -> Result<()> {
    let begin = Instant::now();
    step()?;
    times.push(begin.elapsed().as_secs_f64() * 1e6);
    Ok(())
}

fn main() -> Result<()> {
    let steps: usize = std::env::args().nth(1).and_then(|word| word.parse().ok()).unwrap_or(2000);
    let ctx = Context::cpu()?;
    let (mut c, mut reused, mut per_step) = (Model::new(&ctx)?, Model::new(&ctx)?, Model::new(&ctx)?);

    let raw = |data: &mut Vec<f32>| sys::dsopt_tensor {
        data: data.as_mut_ptr().cast(),
        numel: NUMEL as i64,
        dtype: sys::DSOPT_DTYPE_F32,
        reserved: 0,
    };
    let params: Vec<_> = c.weights.iter_mut().map(raw).collect();
    let raw_grads: Vec<_> = c.grads.iter_mut().map(raw).collect();
    // SAFETY: the vectors outlive the optimizer's last step, and are not used otherwise.
    let bound =
        unsafe { sys::dsopt_optimizer_bind(c.opt.as_ptr(), sys::DSOPT_BIND_PARAMS, params.as_ptr(), TENSORS as i64) };
    assert_eq!(bound, sys::DSOPT_OK);
    let mut args = sys::zeroed!(dsopt_step);
    args.grads = raw_grads.as_ptr();
    args.count = TENSORS as i64;
    let step_c = |args: &sys::dsopt_step| {
        // SAFETY: as above.
        assert_eq!(unsafe { sys::dsopt_optimizer_step(c.opt.as_ptr(), args) }, sys::DSOPT_OK);
        Ok(())
    };
    let with_params = sys::dsopt_step { params: params.as_ptr(), ..args };

    let mut list: Vec<TensorMut> = reused.weights.iter_mut().map(TensorMut::from).collect();
    let grads: Vec<TensorRef> = reused.grads.iter().map(TensorRef::from).collect();
    let mut step_reused = || reused.opt.step(&mut list, &grads);

    let mut step_per_step = || {
        let mut list: Vec<TensorMut> = per_step.weights.iter_mut().map(TensorMut::from).collect();
        let grads: Vec<TensorRef> = per_step.grads.iter().map(TensorRef::from).collect();
        per_step.opt.step(&mut list, &grads)
    };

    let mut times = [Vec::new(), Vec::new(), Vec::new(), Vec::new()];
    for _ in 0..WARM_UP + steps {
        timed(&mut times[0], &mut || step_c(&args))?;
        timed(&mut times[1], &mut || step_c(&with_params))?;
        timed(&mut times[2], &mut step_reused)?;
        timed(&mut times[3], &mut step_per_step)?;
    }
    let [bound, c_call, reused_lists, per_step_lists] = times.map(|times| median(times[WARM_UP..].to_vec()));
    println!("c_bound {bound:.2}");
    println!("c_params {c_call:.2}");
    println!("rust {reused_lists:.2} ratio {:.3}", reused_lists / c_call);
    println!("rust_lists_each_step {per_step_lists:.2} ratio {:.3}", per_step_lists / c_call);
    Ok(())
}
