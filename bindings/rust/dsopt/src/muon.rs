// SPDX-License-Identifier: Apache-2.0
use crate::group::{defaults, sealed::Sealed, Group, Moment};
use crate::{sys, Dtype, Result};

/// Coefficients of the Newton-Schulz iterations of [`Muon`].
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum NsSchedule {
    /// This triple in every step.
    Constant(f64, f64, f64),
    /// Polar Express, Amsel et al. 2025: five triples, of which later steps repeat the last one.
    PolarExpress,
    /// You's five triples ("quintic"), of which later steps repeat the last one.
    You,
}

impl Default for NsSchedule {
    /// The triple of Jordan et al. 2024.
    fn default() -> NsSchedule {
        NsSchedule::Constant(3.4445, -4.7750, 2.0315)
    }
}

/// Factor of the learning rate of [`Muon`] for a matrix of `r` outputs and `c` inputs. Weight decay does not have it.
/// `r` is the number of rows, or of columns with [`Param::rows_are_inputs`](crate::Param::rows_are_inputs).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Adjust {
    /// `sqrt(max(1, r / c))`.
    #[default]
    Original = 0,
    /// `0.2 sqrt(max(r, c))`: updates as large as those of AdamW, so its learning rate and weight decay can be used.
    MatchRmsAdamw = 1,
    /// `sqrt(r / c)`.
    Spectral = 2,
    /// 1.
    None = 3,
}

/// Muon (Jordan et al. 2024), as in torch.optim.Muon: the momentum of a matrix is orthogonalised. Weight decay is
/// decoupled.
///
/// A parameter is one matrix, with two dims, or is partitioned into matrices by
/// [`Param::blocks`](crate::Param::blocks). Other parameters, such as embeddings, norms and biases, go into a group of
/// another algorithm. One NaN that is applied ends a whole matrix, so prefer
/// [`Nonfinite::Skip`](crate::Nonfinite::Skip).
///
/// ```
/// use dsopt::{AdamW, Context, Dtype, Muon, Optimizer, Param};
///
/// let mut opt = Optimizer::new(&Context::cpu()?)?;
/// opt.add_group(&Muon { lr: 0.02, ..Default::default() }, &[Param::shaped("w", Dtype::F32, &[64, 32])])?;
/// opt.add_group(&AdamW { lr: 3e-4, ..Default::default() }, &[Param::new("b", Dtype::F32, 64)])?;
/// # Ok::<(), dsopt::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Muon {
    /// Learning rate: finite, not negative.
    pub lr: f64,
    /// Decay of the momentum, in `(0, 1)`.
    pub momentum: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// Lower bound of the norm by which a matrix is divided, in `[2^-100, 1]`.
    pub eps: f64,
    /// Clip by the L2 norm of this group's gradients alone. 0 is off.
    pub max_norm: f64,
    /// Number of Newton-Schulz iterations, 1 to 99.
    pub ns_steps: i32,
    /// Coefficients of the iterations.
    pub ns_schedule: NsSchedule,
    /// Dtype of the inputs of products: `BF16`, `F16` or `F32`. Sums are `f32`. Matrices with fewer than 16 rows or
    /// columns use `F32`.
    pub ns_dtype: Dtype,
    /// Factor of the learning rate, by the shape of the matrix.
    pub adjust: Adjust,
    /// Format of the momentum: `F32`, `Bf16` or `Bf16Random`.
    pub exp_avg_format: Moment,
    /// Nesterov's momentum.
    pub nesterov: bool,
    /// With `nesterov`: divide momentum and gradient by their corrections as in optax, before they are added.
    pub bias_correction: bool,
}

impl Default for Muon {
    fn default() -> Muon {
        Muon {
            lr: 1e-3,
            momentum: 0.95,
            weight_decay: 0.1,
            eps: 1e-7,
            max_norm: 0.0,
            ns_steps: 5,
            ns_schedule: NsSchedule::default(),
            ns_dtype: Dtype::BF16,
            adjust: Adjust::default(),
            exp_avg_format: Moment::F32,
            nesterov: true,
            bias_correction: false,
        }
    }
}

impl Sealed for Muon {
    fn raw(&self) -> Result<sys::dsopt_group> {
        let (schedule, [a, b, c]) = match self.ns_schedule {
            NsSchedule::Constant(a, b, c) => (sys::DSOPT_NS_CONSTANT, [a, b, c]),
            NsSchedule::PolarExpress => (sys::DSOPT_NS_POLAR_EXPRESS, [0.0; 3]),
            NsSchedule::You => (sys::DSOPT_NS_YOU, [0.0; 3]),
        };
        let mut flags = 0;
        if self.nesterov {
            flags |= sys::DSOPT_GROUP_NESTEROV;
        }
        if !self.bias_correction {
            flags |= sys::DSOPT_GROUP_NO_BIAS_CORRECTION;
        }
        Ok(sys::dsopt_group {
            lr: self.lr,
            momentum: self.momentum,
            weight_decay: self.weight_decay,
            eps: self.eps,
            max_norm: self.max_norm,
            ns_a: a,
            ns_b: b,
            ns_c: c,
            ns_steps: self.ns_steps,
            ns_schedule: schedule,
            ns_dtype: self.ns_dtype as i32,
            adjust: self.adjust as i32,
            exp_avg_format: self.exp_avg_format as i32,
            flags,
            ..defaults(sys::DSOPT_ALGORITHM_MUON)?
        })
    }
}

impl Group for Muon {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_those_of_the_library() {
        let (initial, library) = (Muon::default().raw().unwrap(), defaults(sys::DSOPT_ALGORITHM_MUON).unwrap());
        assert_eq!(format!("{initial:?}"), format!("{library:?}"));
    }
}
