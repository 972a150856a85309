//! Tensors in memory: element types, strided access, inputs and outputs of any element type.

pub(crate) mod input;
pub(crate) mod output;
pub(crate) mod quantised_rows;
pub(crate) mod strided;

use crate::kernel::simd::{Simd, WIDTH};
use ascend_spec::minifloat::{Float8E4M3Fn, HiFloat8};
use half::{bf16, f16};

/// An element type of tensors.
pub(crate) trait Element: Copy + Send + Sync + 'static {
    /// Zero, which pads the end of a row.
    const ZERO: Self;

    /// Widens to single precision, exactly.
    fn widen<S: Simd>(simd: S, values: &[Self; WIDTH]) -> S::Register;

    /// Rounds single precision to the nearest value of this type. Ties go to even, for HIFLOAT8 away from 0.
    fn narrow<S: Simd>(simd: S, register: S::Register) -> [Self; WIDTH];

    /// Rounds to the nearest values of this type, in single precision.
    #[inline(always)]
    fn round<S: Simd>(simd: S, register: S::Register) -> S::Register {
        Self::widen(simd, &Self::narrow(simd, register))
    }
}

impl Element for f16 {
    const ZERO: Self = f16::ZERO;

    #[inline(always)]
    fn widen<S: Simd>(simd: S, values: &[Self; WIDTH]) -> S::Register {
        simd.widen_f16(&values.map(f16::to_bits))
    }

    #[inline(always)]
    fn narrow<S: Simd>(simd: S, register: S::Register) -> [Self; WIDTH] {
        simd.narrow_f16(register).map(f16::from_bits)
    }
}

impl Element for bf16 {
    const ZERO: Self = bf16::ZERO;

    #[inline(always)]
    fn widen<S: Simd>(simd: S, values: &[Self; WIDTH]) -> S::Register {
        simd.widen_bf16(&values.map(bf16::to_bits))
    }

    #[inline(always)]
    fn round<S: Simd>(simd: S, register: S::Register) -> S::Register {
        simd.round_bf16(register)
    }

    #[inline(always)]
    fn narrow<S: Simd>(simd: S, register: S::Register) -> [Self; WIDTH] {
        simd.narrow_bf16(register).map(bf16::from_bits)
    }
}

impl Element for f32 {
    const ZERO: Self = 0.0;

    #[inline(always)]
    fn widen<S: Simd>(simd: S, values: &[Self; WIDTH]) -> S::Register {
        simd.load(values)
    }

    #[inline(always)]
    fn narrow<S: Simd>(simd: S, register: S::Register) -> [Self; WIDTH] {
        let mut values = [0.0; WIDTH];
        simd.store(register, &mut values);
        values
    }

    #[inline(always)]
    fn round<S: Simd>(_: S, register: S::Register) -> S::Register {
        register
    }
}

/// Quantised elements, without scale and offset.
impl Element for i8 {
    const ZERO: Self = 0;

    #[inline(always)]
    fn widen<S: Simd>(simd: S, values: &[Self; WIDTH]) -> S::Register {
        simd.widen_i8(values)
    }

    #[inline(always)]
    fn narrow<S: Simd>(simd: S, register: S::Register) -> [Self; WIDTH] {
        let mut values = [0.0; WIDTH];
        simd.store(register, &mut values);
        let mut narrow = [0; WIDTH];
        for i in 0..WIDTH {
            // The cast saturates, and turns NaN into 0.
            narrow[i] = values[i].round_ties_even() as i8;
        }
        narrow
    }
}

/// Implements [`Element`] for 8-bit types by a table of their values.
macro_rules! looked_up {
    ($($element:ident),*) => {$(
        impl Element for $element {
            const ZERO: Self = $element::from_bits(0);

            #[inline(always)]
            fn widen<S: Simd>(simd: S, values: &[Self; WIDTH]) -> S::Register {
                simd.load(&values.map($element::to_f32))
            }

            #[inline(always)]
            fn narrow<S: Simd>(simd: S, register: S::Register) -> [Self; WIDTH] {
                let mut values = [0.0; WIDTH];
                simd.store(register, &mut values);
                values.map($element::from_f32)
            }
        }
    )*};
}

looked_up!(Float8E4M3Fn, HiFloat8);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::simd::Portable;

    #[test]
    fn bf16_agrees_with_the_half_crate() {
        let all: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
        for values in all.as_chunks::<WIDTH>().0 {
            let wide = bf16::widen(Portable, values);
            for (value, wide) in values.iter().zip(wide) {
                assert!(wide.to_bits() == value.to_f32().to_bits() || wide.is_nan() && value.is_nan());
            }
            // The value, the middle to its neighbour, and both sides of the middle.
            for tail in [0, 0x7fff, 0x8000, 0x8001] {
                let wide = wide.map(|v| f32::from_bits(v.to_bits() | tail));
                for (narrow, wide) in bf16::narrow(Portable, wide).iter().zip(wide) {
                    let want = bf16::from_f32(wide);
                    assert!(
                        narrow.to_bits() == want.to_bits() || narrow.is_nan() && want.is_nan(),
                        "{wide}: {narrow} is not {want}"
                    );
                }
            }
        }
    }
}
