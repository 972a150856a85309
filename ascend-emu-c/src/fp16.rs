//! Members of `op::fp16_t` that programs take from `libnnopbase.so`, under the names that C++ compilers give them: the
//! examples of operators fill and print half-precision tensors with this type.
//!
//! An `op::fp16_t` is the struct `op::tagFp16` of one `uint16_t`. Operators that return one by value are not here:
//! on some processors no Rust function can place their result where C++ expects it. The header of this project has
//! them inline.

use half::f16;

/// `op::fp16_t`.
type Half = u16;

/// A half as a number to round: one that is not finite counts as an infinity of its sign, as in CANN.
fn to_round(half: Half) -> f64 {
    let value = f16::from_bits(half);
    if value.is_finite() {
        value.to_f64().round_ties_even()
    } else if value.is_sign_negative() {
        f64::NEG_INFINITY
    } else {
        f64::INFINITY
    }
}

macro_rules! assign {
    ($($symbol:literal $name:ident($type:ty) $value:expr;)*) => {
        $(
            /// `fp16_t &fp16_t::operator=(const T &)`: to nearest, ties to even; too large becomes infinite.
            ///
            /// # Safety
            ///
            /// `this` may be written, `value` read.
            // SAFETY: the name is that of the C++ member, which nothing else in this library defines.
            #[unsafe(export_name = $symbol)]
            pub unsafe extern "C" fn $name(this: *mut Half, value: *const $type) -> *mut Half {
                let convert: fn($type) -> f16 = $value;
                // SAFETY: the caller's promise.
                unsafe { *this = convert(*value).to_bits() };
                this
            }
        )*
    };
}

assign! {
    "_ZN2op7tagFp16aSERKS0_" assign_half(Half) f16::from_bits;
    "_ZN2op7tagFp16aSERKf" assign_f32(f32) f16::from_f32;
    "_ZN2op7tagFp16aSERKd" assign_f64(f64) f16::from_f64;
    "_ZN2op7tagFp16aSERKa" assign_i8(i8) |value| f16::from_f64(value.into());
    "_ZN2op7tagFp16aSERKh" assign_u8(u8) |value| f16::from_f64(value.into());
    "_ZN2op7tagFp16aSERKs" assign_i16(i16) |value| f16::from_f64(value.into());
    "_ZN2op7tagFp16aSERKt" assign_u16(u16) |value| f16::from_f64(value.into());
    "_ZN2op7tagFp16aSERKi" assign_i32(i32) |value| f16::from_f64(value.into());
    "_ZN2op7tagFp16aSERKj" assign_u32(u32) |value| f16::from_f64(value.into());
    "_ZN2op7tagFp16aSERKl" assign_i64(i64) |value| f16::from_f64(value as f64);
    "_ZN2op7tagFp16aSERKm" assign_u64(u64) |value| f16::from_f64(value as f64);
}

macro_rules! convert {
    ($($symbol:literal $name:ident -> $type:ty, $value:expr;)*) => {
        $(
            /// `fp16_t::operator T()` or `fp16_t::toT()`; integers are rounded to nearest, ties to even, and saturate.
            ///
            /// # Safety
            ///
            /// `this` may be read.
            // SAFETY: as for the assignments.
            #[unsafe(export_name = $symbol)]
            pub unsafe extern "C" fn $name(this: *const Half) -> $type {
                let convert: fn(Half) -> $type = $value;
                // SAFETY: the caller's promise.
                convert(unsafe { *this })
            }
        )*
    };
}

convert! {
    "_ZNK2op7tagFp16cvfEv" as_f32 -> f32, |half| f16::from_bits(half).to_f32();
    "_ZNK2op7tagFp16cvdEv" as_f64 -> f64, |half| f16::from_bits(half).to_f64();
    "_ZNK2op7tagFp16cvaEv" as_i8 -> i8, |half| to_round(half) as i8;
    "_ZNK2op7tagFp16cvhEv" as_u8 -> u8, |half| to_round(half) as u8;
    "_ZNK2op7tagFp16cvsEv" as_i16 -> i16, |half| to_round(half) as i16;
    "_ZNK2op7tagFp16cvtEv" as_u16 -> u16, |half| to_round(half) as u16;
    "_ZNK2op7tagFp16cviEv" as_i32 -> i32, |half| to_round(half) as i32;
    "_ZNK2op7tagFp16cvjEv" as_u32 -> u32, |half| to_round(half) as u32;
    // CANN goes by way of 32 bits.
    "_ZNK2op7tagFp16cvlEv" as_i64 -> i64, |half| i64::from(to_round(half) as i32);
    "_ZNK2op7tagFp16cvmEv" as_u64 -> u64, |half| u64::from(to_round(half) as u32);
    "_ZNK2op7tagFp16cvbEv" as_bool -> bool, |half| half != 0;
    "_ZN2op7tagFp167toFloatEv" to_float -> f32, |half| f16::from_bits(half).to_f32();
    "_ZN2op7tagFp168toDoubleEv" to_double -> f64, |half| f16::from_bits(half).to_f64();
    "_ZN2op7tagFp166toInt8Ev" to_i8 -> i8, |half| to_round(half) as i8;
    "_ZN2op7tagFp167toUInt8Ev" to_u8 -> u8, |half| to_round(half) as u8;
    "_ZN2op7tagFp167toInt16Ev" to_i16 -> i16, |half| to_round(half) as i16;
    "_ZN2op7tagFp168toUInt16Ev" to_u16 -> u16, |half| to_round(half) as u16;
    "_ZN2op7tagFp167toInt32Ev" to_i32 -> i32, |half| to_round(half) as i32;
    "_ZN2op7tagFp168toUInt32Ev" to_u32 -> u32, |half| to_round(half) as u32;
    "_ZN2op7tagFp165IsInfEv" is_inf -> i32, |half| match half {
        0x7c00 => 1,
        0xfc00 => -1,
        _ => 0,
    };
}

macro_rules! compare {
    ($($symbol:literal $name:ident $operator:tt;)*) => {
        $(
            /// A comparison of two numbers.
            ///
            /// # Safety
            ///
            /// Both may be read.
            // SAFETY: as for the assignments.
            #[unsafe(export_name = $symbol)]
            pub unsafe extern "C" fn $name(this: *const Half, other: *const Half) -> bool {
                // SAFETY: the caller's promise.
                let (this, other) = unsafe { (*this, *other) };
                f16::from_bits(this) $operator f16::from_bits(other)
            }
        )*
    };
}

compare! {
    "_ZNK2op7tagFp16eqERKS0_" equal ==;
    "_ZNK2op7tagFp16neERKS0_" unequal !=;
    "_ZNK2op7tagFp16gtERKS0_" greater >;
    "_ZNK2op7tagFp16geERKS0_" greater_or_equal >=;
    "_ZNK2op7tagFp16ltERKS0_" less <;
    "_ZNK2op7tagFp16leERKS0_" less_or_equal <=;
}
