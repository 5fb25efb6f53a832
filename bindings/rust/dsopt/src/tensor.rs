// SPDX-License-Identifier: Apache-2.0
use crate::sys;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::ptr;

/// Type of the elements of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Dtype {
    /// `f32`
    F32 = 1,
    /// [`struct@F16`]
    F16 = 2,
    /// [`struct@BF16`]
    BF16 = 3,
    /// `i32`: integer state tensors.
    I32 = 4,
    /// `i16`: the remainders of masters. State tensors only.
    I16 = 6,
    /// `u8`: codes of [`Moment::Q8`](crate::Moment::Q8). State tensors only.
    U8 = 7,
    /// [`struct@F8E4M3`]: codes of [`Moment::E4m3`](crate::Moment::E4m3). State tensors only.
    F8E4M3 = 8,
}

impl Dtype {
    pub(crate) fn of(dtype: i32) -> Option<Dtype> {
        Some(match dtype {
            sys::DSOPT_DTYPE_F32 => Dtype::F32,
            sys::DSOPT_DTYPE_F16 => Dtype::F16,
            sys::DSOPT_DTYPE_BF16 => Dtype::BF16,
            sys::DSOPT_DTYPE_I32 => Dtype::I32,
            sys::DSOPT_DTYPE_I16 => Dtype::I16,
            sys::DSOPT_DTYPE_U8 => Dtype::U8,
            sys::DSOPT_DTYPE_F8_E4M3 => Dtype::F8E4M3,
            _ => return None,
        })
    }

    /// Bytes of an element.
    pub(crate) fn size(self) -> usize {
        match self {
            Dtype::F32 | Dtype::I32 => 4,
            Dtype::F16 | Dtype::BF16 | Dtype::I16 => 2,
            Dtype::U8 | Dtype::F8E4M3 => 1,
        }
    }
}

/// The bits of a number in IEEE half precision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct F16(pub u16);

/// The bits of a bfloat16: the upper half of an `f32`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct BF16(pub u16);

/// The bits of an FP8 E4M3: no infinity, and 448 is the largest value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct F8E4M3(pub u8);

impl F8E4M3 {
    /// Exact. A moment is this times the scale of its block.
    pub fn to_f32(self) -> f32 {
        if self.0 & 0x7f == 0x7f {
            return f32::NAN;
        }
        let magnitude = f32::from_bits(u32::from(self.0 & 0x7f) << 20) * 2f32.powi(120);
        f32::from_bits(magnitude.to_bits() | u32::from(self.0 & 0x80) << 24)
    }
}

impl BF16 {
    /// Rounds to nearest, ties to even.
    pub fn from_f32(value: f32) -> BF16 {
        let bits = value.to_bits();
        if value.is_nan() {
            return BF16((bits >> 16) as u16 | 0x40); // quiet NaN: the payload could be in the lower half only
        }
        BF16(((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16)
    }

    /// Exact.
    pub fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }
}

impl F16 {
    /// Rounds to nearest, ties to even; beyond 65504 to infinity.
    pub fn from_f32(value: f32) -> F16 {
        let sign = (value.to_bits() >> 16 & 0x8000) as u16;
        let magnitude = value.abs();
        let bits = magnitude.to_bits();
        F16(sign
            | if value.is_nan() {
                0x7e00 | (bits >> 13 & 0x3ff) as u16
            } else if magnitude >= 65520.0 {
                0x7c00
            } else if magnitude < 6.103_515_6e-5 {
                // Subnormal: the addition rounds to multiples of 2^-24, the unit of these numbers.
                ((magnitude + 0.5).to_bits() - 0.5f32.to_bits()) as u16
            } else {
                ((bits + 0xfff + (bits >> 13 & 1) - (112 << 23)) >> 13) as u16
            })
    }

    /// Exact.
    pub fn to_f32(self) -> f32 {
        let (exponent, fraction) = (self.0 >> 10 & 31, u32::from(self.0 & 0x3ff));
        let magnitude = match exponent {
            0 => fraction as f32 * 2f32.powi(-24),
            31 => f32::from_bits(0x7f80_0000 | fraction << 13),
            _ => f32::from_bits((u32::from(exponent) + 112) << 23 | fraction << 13),
        };
        f32::from_bits(magnitude.to_bits() | u32::from(self.0 & 0x8000) << 16)
    }
}

mod sealed {
    pub trait Sealed {}
}

/// Element types of tensors: `f32`, [`struct@F16`] and [`struct@BF16`]; of state tensors also `i32`, `i16`, `u8` and
/// [`struct@F8E4M3`].
pub trait Element: sealed::Sealed + Copy + Default + Send + Sync + 'static {
    /// The dtype of tensors of this element.
    const DTYPE: Dtype;
}

/// A tensor that is only read: a slice without its type.
///
/// Made with `from` or `into` of slices, arrays and vectors.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct TensorRef<'a> {
    raw: sys::dsopt_tensor,
    memory: PhantomData<&'a [u8]>,
}

/// A tensor that is written to: a mutable slice without its type.
///
/// Made with `from` or `into` of slices, arrays and vectors.
#[derive(Debug)]
#[repr(transparent)]
pub struct TensorMut<'a> {
    raw: sys::dsopt_tensor,
    memory: PhantomData<&'a mut [u8]>,
}

// SAFETY: a shared slice of plain numbers.
unsafe impl Send for TensorRef<'_> {}
// SAFETY: as above.
unsafe impl Sync for TensorRef<'_> {}
// SAFETY: a mutable slice of plain numbers.
unsafe impl Send for TensorMut<'_> {}
// SAFETY: nothing can be done with `&TensorMut` except reading.
unsafe impl Sync for TensorMut<'_> {}

impl<'a> TensorRef<'a> {
    /// In a list of gradients: no gradient this time. The parameter and its step count do not change.
    ///
    /// With [`averages`](crate::OptimizerBuilder::averages) it counts as zeros of the dtype of the parameter, which must
    /// then be the dtype of the gradients of the other ranks; see [`TensorRef::absent_as`].
    pub fn absent() -> TensorRef<'a> {
        TensorRef::absent_as(Dtype::F32, 0)
    }

    /// As [`TensorRef::absent`], for averages of gradients that have this dtype on the other ranks. `numel` is that of
    /// the parameter.
    pub fn absent_as(dtype: Dtype, numel: usize) -> TensorRef<'a> {
        let raw = sys::dsopt_tensor { data: ptr::null_mut(), numel: numel as i64, dtype: dtype as i32, reserved: 0 };
        TensorRef { raw, memory: PhantomData }
    }

    /// A tensor anywhere, such as on a device.
    ///
    /// # Safety
    /// `data` points to `numel` elements of this dtype in memory of the context that the tensor is used with. They are
    /// valid and not written to during `'a`, and on CUDA until the stream has passed the call.
    pub unsafe fn from_raw_parts(data: *const c_void, numel: usize, dtype: Dtype) -> TensorRef<'a> {
        let raw =
            sys::dsopt_tensor { data: data as *mut c_void, numel: numel as i64, dtype: dtype as i32, reserved: 0 };
        TensorRef { raw, memory: PhantomData }
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.raw.numel as usize
    }
}

impl<'a> TensorMut<'a> {
    /// A tensor anywhere, such as on a device.
    ///
    /// # Safety
    /// `data` points to `numel` elements of this dtype in memory of the context that the tensor is used with. They are
    /// valid and not used elsewhere during `'a`, and on CUDA until the stream has passed the call.
    pub unsafe fn from_raw_parts(data: *mut c_void, numel: usize, dtype: Dtype) -> TensorMut<'a> {
        let raw = sys::dsopt_tensor { data, numel: numel as i64, dtype: dtype as i32, reserved: 0 };
        TensorMut { raw, memory: PhantomData }
    }

    /// The same tensor, only read.
    pub fn as_ref(&self) -> TensorRef<'_> {
        TensorRef { raw: self.raw, memory: PhantomData }
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.raw.numel as usize
    }
}

/// Returns the list for the library. A tensor in Rust has the layout of the struct of C.
pub(crate) fn list(tensors: &[TensorRef<'_>]) -> *const sys::dsopt_tensor {
    tensors.as_ptr().cast()
}

/// As [`list`], for tensors that the call writes to.
pub(crate) fn list_mut(tensors: &mut [TensorMut<'_>]) -> *mut sys::dsopt_tensor {
    tensors.as_mut_ptr().cast()
}

impl<'a, T: Element> From<&'a [T]> for TensorRef<'a> {
    fn from(slice: &'a [T]) -> TensorRef<'a> {
        // SAFETY: the elements of the slice, borrowed for 'a.
        unsafe { TensorRef::from_raw_parts(slice.as_ptr().cast(), slice.len(), T::DTYPE) }
    }
}

impl<'a, T: Element> From<&'a mut [T]> for TensorMut<'a> {
    fn from(slice: &'a mut [T]) -> TensorMut<'a> {
        // SAFETY: the elements of the slice, borrowed mutably for 'a.
        unsafe { TensorMut::from_raw_parts(slice.as_mut_ptr().cast(), slice.len(), T::DTYPE) }
    }
}

impl<'a, T: Element> From<&'a Vec<T>> for TensorRef<'a> {
    fn from(vector: &'a Vec<T>) -> TensorRef<'a> {
        vector.as_slice().into()
    }
}

impl<'a, T: Element> From<&'a mut Vec<T>> for TensorMut<'a> {
    fn from(vector: &'a mut Vec<T>) -> TensorMut<'a> {
        vector.as_mut_slice().into()
    }
}

impl<'a, T: Element, const N: usize> From<&'a [T; N]> for TensorRef<'a> {
    fn from(array: &'a [T; N]) -> TensorRef<'a> {
        array.as_slice().into()
    }
}

impl<'a, T: Element, const N: usize> From<&'a mut [T; N]> for TensorMut<'a> {
    fn from(array: &'a mut [T; N]) -> TensorMut<'a> {
        array.as_mut_slice().into()
    }
}

macro_rules! elements {
    ($($element:ty = $dtype:ident,)*) => {
        $(
            impl sealed::Sealed for $element {}
            impl Element for $element {
                const DTYPE: Dtype = Dtype::$dtype;
            }
        )*
    };
}
elements! { f32 = F32, F16 = F16, BF16 = BF16, i32 = I32, i16 = I16, u8 = U8, F8E4M3 = F8E4M3, }

/// A tensor that owns its memory, such as an entry of [`Optimizer::new_state`](crate::Optimizer::new_state).
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Array {
    /// Of `f32`.
    F32(Vec<f32>),
    /// Of [`struct@F16`].
    F16(Vec<F16>),
    /// Of [`struct@BF16`].
    BF16(Vec<BF16>),
    /// Of `i32`.
    I32(Vec<i32>),
    /// Of `i16`.
    I16(Vec<i16>),
    /// Of `u8`.
    U8(Vec<u8>),
    /// Of [`struct@F8E4M3`].
    F8E4M3(Vec<F8E4M3>),
}

impl Array {
    /// Zeros.
    pub fn zeros(dtype: Dtype, numel: usize) -> Array {
        match dtype {
            Dtype::F32 => Array::F32(vec![0.0; numel]),
            Dtype::F16 => Array::F16(vec![F16(0); numel]),
            Dtype::BF16 => Array::BF16(vec![BF16(0); numel]),
            Dtype::I32 => Array::I32(vec![0; numel]),
            Dtype::I16 => Array::I16(vec![0; numel]),
            Dtype::U8 => Array::U8(vec![0; numel]),
            Dtype::F8E4M3 => Array::F8E4M3(vec![F8E4M3(0); numel]),
        }
    }

    /// A tensor over the elements, only read.
    pub fn as_tensor(&self) -> TensorRef<'_> {
        match self {
            Array::F32(values) => values.into(),
            Array::F16(values) => values.into(),
            Array::BF16(values) => values.into(),
            Array::I32(values) => values.into(),
            Array::I16(values) => values.into(),
            Array::U8(values) => values.into(),
            Array::F8E4M3(values) => values.into(),
        }
    }

    /// A tensor over the elements, which may be written to.
    pub fn as_tensor_mut(&mut self) -> TensorMut<'_> {
        match self {
            Array::F32(values) => values.into(),
            Array::F16(values) => values.into(),
            Array::BF16(values) => values.into(),
            Array::I32(values) => values.into(),
            Array::I16(values) => values.into(),
            Array::U8(values) => values.into(),
            Array::F8E4M3(values) => values.into(),
        }
    }
}
