// SPDX-License-Identifier: Apache-2.0
use crate::error::{check, count};
use crate::tensor::{list, list_mut};
use crate::{sys, Comm, Context, Error, Result, TensorMut, TensorRef};
use std::ptr;

/// Kind of a norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Norm {
    /// Root of the sum of squares.
    L2 = 0,
    /// Largest magnitude.
    Max = 1,
}

/// Result of [`Context::norm`].
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct NormResult {
    /// The norm; over all ranks, if there was a comm.
    pub norm: f64,
    /// Factor that clips.
    pub coefficient: f32,
    /// Number of Inf and NaN; over all ranks, if there was a comm.
    pub nonfinite: i64,
    /// The first tensor on this rank with an Inf or NaN.
    pub first_bad: Option<usize>,
}

/// Lists without an optimizer.
impl Context {
    /// Set every element to zero.
    pub fn zero_grad(&self, grads: &mut [TensorMut<'_>]) -> Result<()> {
        let (raw, length) = (list_mut(grads), count(grads.len()));
        // SAFETY: the list is borrowed mutably.
        check(unsafe { sys::dsopt_zero_grad(self.as_ptr(), raw, length, sys::DSOPT_ZERO_FILL, ptr::null_mut()) })
    }

    /// Norm and finite check of a list in one read, here or over all ranks of a comm.
    pub fn norm(
        &self,
        tensors: &[TensorRef<'_>],
        norm: Norm,
        max_norm: f64,
        comm: Option<&mut Comm>,
    ) -> Result<NormResult> {
        self.host_only("the result of norm")?;
        let mut result =
            sys::dsopt_norm_result { norm: 0.0, coefficient: 0.0, reserved: 0, nonfinite: 0, first_bad: -1 };
        let comm = comm.map_or(ptr::null_mut(), |comm| comm.as_ptr());
        // SAFETY: the list is borrowed, and the comm mutably.
        let status = unsafe {
            sys::dsopt_tensors_norm(
                self.as_ptr(),
                list(tensors),
                count(tensors.len()),
                norm as i32,
                max_norm,
                comm,
                &mut result,
                ptr::null_mut(),
            )
        };
        check(status)?;
        Ok(NormResult {
            norm: result.norm,
            coefficient: result.coefficient,
            nonfinite: result.nonfinite,
            first_bad: usize::try_from(result.first_bad).ok(),
        })
    }

    /// `y = a * x + b * y` between any float dtypes: scale, convert, accumulate. With `b` 0 `y` is not read.
    pub fn axpby(&self, a: f32, x: &[TensorRef<'_>], b: f32, y: &mut [TensorMut<'_>]) -> Result<()> {
        self.host_only("a")?;
        if x.len() != y.len() {
            let text = format!("the list x has {} tensors, y {}", x.len(), y.len());
            return Err(Error::new(sys::DSOPT_ERR_SHAPE, text));
        }
        let (length, x, y) = (count(x.len()), list(x), list_mut(y));
        // SAFETY: lists of the same length; x is borrowed and y mutably, so they are disjoint.
        check(unsafe { sys::dsopt_tensors_axpby(self.as_ptr(), &a, x, b, y, length, ptr::null_mut()) })
    }

    /// Clip every element to `[-limit, limit]`.
    pub fn clamp(&self, tensors: &mut [TensorMut<'_>], limit: f64) -> Result<()> {
        let (raw, length) = (list_mut(tensors), count(tensors.len()));
        // SAFETY: the list is borrowed mutably.
        check(unsafe { sys::dsopt_tensors_clamp(self.as_ptr(), raw, length, limit, ptr::null_mut()) })
    }
}
