// SPDX-License-Identifier: Apache-2.0
// Linear regression, y = 2 x0 - 3 x1 + 1, in fp32 with AdamW: examples/fp32.c in Rust, with only the standard library.
// Structs and functions are declared as in dsopt.h.
#![allow(dead_code)] // some fields are only there for the layout
use std::ffi::{c_void, CStr};
use std::os::raw::c_char;
use std::ptr::{null, null_mut};

const F32: i32 = 1; // DSOPT_DTYPE_F32
const ADAMW: i32 = 3; // DSOPT_ALGORITHM_ADAMW
const ZERO_FILL: i32 = 0; // DSOPT_ZERO_FILL

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    numel: i64,
    dtype: i32,
    reserved: i32,
}

#[repr(C)]
struct Param {
    tensor: Tensor,
    name: *const c_char,
    dims: *const i64,
    ndim: i32,
    flags: i32,
    offset: i64,
    expert: i32,
    group: i32,
    rows: i64,
    cols: i64,
}

#[repr(C)]
struct Group {
    size: usize,
    algorithm: i32,
    flags: i32,
    lr: f64,
    beta1: f64,
    beta2: f64,
    eps: f64,
    weight_decay: f64,
    max_norm: f64,
    min_trust: f64,
    max_trust: f64,
    freeze_step: i64,
    var_interval_steps: i64,
    local_interval_steps: i64,
    max_local_interval: i64,
    trust_beta: f64,
    trust_threshold: f64,
    trust_min_change: f64,
    trust_max_change: f64,
}

type ParallelFor = unsafe extern "C" fn(*mut c_void, i64, unsafe extern "C" fn(*mut c_void, i64), *mut c_void);

#[repr(C)]
struct Step {
    size: usize,
    grads: *const Tensor,
    count: i64,
    params: *const Tensor,
    out: *const Tensor,
    state: *const Tensor,
    state_count: i64,
    lr: *const f32,
    grad_scale: *const f32,
    skip: *const i32,
    grad_norms: *const f32,
    report: *mut f32,
    workspace: *mut c_void,
    workspace_bytes: usize,
    stream: *mut c_void,
    parallel_for: Option<ParallelFor>,
    parallel_user: *mut c_void,
    flags: i32,
    reserved: i32,
    hyper: *const f32,
}

extern "C" {
    fn dsopt_status_name(status: i32) -> *const c_char;
    fn dsopt_last_error() -> *const c_char;
    fn dsopt_context_create(desc: *const c_void, ctx: *mut *mut c_void) -> i32;
    fn dsopt_context_destroy(ctx: *mut c_void);
    fn dsopt_optimizer_create(ctx: *mut c_void, desc: *const c_void, opt: *mut *mut c_void) -> i32;
    fn dsopt_optimizer_destroy(opt: *mut c_void);
    fn dsopt_group_init(group: *mut Group, size: usize, algorithm: i32) -> i32;
    fn dsopt_optimizer_add_group(opt: *mut c_void, group: *const Group, params: *const Param, count: i64) -> i32;
    fn dsopt_optimizer_step(opt: *mut c_void, step: *const Step) -> i32;
    fn dsopt_zero_grad(ctx: *mut c_void, grads: *mut Tensor, count: i64, how: i32, stream: *mut c_void) -> i32;
    fn dsopt_optimizer_save(opt: *mut c_void, path: *const c_char, io: *const c_void) -> i32;
}

unsafe fn check(status: i32) {
    if status != 0 {
        eprintln!("{:?}: {:?}", CStr::from_ptr(dsopt_status_name(status)), CStr::from_ptr(dsopt_last_error()));
        std::process::exit(1);
    }
}

fn tensor(data: *mut f32, numel: i64) -> Tensor {
    Tensor { data: data.cast(), numel, dtype: F32, reserved: 0 }
}

unsafe fn param(tensor: Tensor, name: &CStr) -> Param {
    let mut param: Param = std::mem::zeroed();
    param.tensor = tensor;
    param.name = name.as_ptr();
    param
}

unsafe fn train() {
    let (mut weights, mut gradients) = ([0f32; 3], [0f32; 3]); // of w, two elements, and of b, one
    let (w, g) = (weights.as_mut_ptr(), gradients.as_mut_ptr());
    let w_name = CStr::from_bytes_with_nul(b"w\0").unwrap();
    let b_name = CStr::from_bytes_with_nul(b"b\0").unwrap();
    let params = [param(tensor(w, 2), w_name), param(tensor(w.add(2), 1), b_name)];
    let mut grads = [tensor(g, 2), tensor(g.add(2), 1)];
    let (mut ctx, mut opt) = (null_mut(), null_mut());
    let mut group: Group = std::mem::zeroed();
    check(dsopt_context_create(null(), &mut ctx)); // CPU
    check(dsopt_optimizer_create(ctx, null(), &mut opt));
    check(dsopt_group_init(&mut group, std::mem::size_of::<Group>(), ADAMW));
    group.lr = 0.02;
    group.weight_decay = 0.0;
    check(dsopt_optimizer_add_group(opt, &group, params.as_ptr(), 2));
    let mut step: Step = std::mem::zeroed();
    step.size = std::mem::size_of::<Step>();
    step.count = 2;
    for i in 0..4000 {
        let (x0, x1) = ((i % 7) as f32 / 7.0, (i % 5) as f32 / 5.0);
        let e = *w * x0 + *w.add(1) * x1 + *w.add(2) - (2.0 * x0 - 3.0 * x1 + 1.0);
        *g += e * x0;
        *g.add(1) += e * x1;
        *g.add(2) += e;
        step.grads = grads.as_ptr();
        check(dsopt_optimizer_step(opt, &step));
        check(dsopt_zero_grad(ctx, grads.as_mut_ptr(), 2, ZERO_FILL, null_mut()));
    }
    println!("{:.2} {:.2} {:.2}", *w, *w.add(1), *w.add(2));
    let path = CStr::from_bytes_with_nul(b"run.safetensors\0").unwrap();
    check(dsopt_optimizer_save(opt, path.as_ptr(), null()));
    dsopt_optimizer_destroy(opt);
    dsopt_context_destroy(ctx);
}

fn main() {
    unsafe { train() }
}
