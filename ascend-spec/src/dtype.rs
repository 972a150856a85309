//! Element types, with the numbers CANN gives them (`aclDataType`).

use std::fmt;

/// Declares [`DType`] once: variant, CANN number, bits per element, CANN name.
macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident = $acl:literal, $bits:literal, $name:literal;)*) => {
        /// An element type. The discriminant is CANN's `aclDataType` value.
        ///
        /// Source: `acl/acl_base.h`, CANN 8.1; types from `HiFloat8` on are known to newer releases only.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(i32)]
        #[non_exhaustive]
        pub enum DType {
            $($(#[$doc])* $variant = $acl,)*
        }

        impl DType {
            /// Every element type, in the order of CANN's numbers.
            pub const ALL: &'static [DType] = &[$(DType::$variant,)*];

            /// The type with CANN's number `value`, or `None` where CANN has no such type.
            pub const fn from_acl(value: i32) -> Option<Self> {
                match value {
                    $($acl => Some(DType::$variant),)*
                    _ => None,
                }
            }

            /// Bits of one element in memory; 0 for types without a fixed size.
            pub const fn bits(self) -> u32 {
                match self {
                    $(DType::$variant => $bits,)*
                }
            }

            /// CANN's name without its `ACL_` prefix, for example `FLOAT16`.
            pub const fn name(self) -> &'static str {
                match self {
                    $(DType::$variant => $name,)*
                }
            }
        }
    };
}

dtypes! {
    /// No type; what CANN reports for a descriptor it cannot read.
    Undefined = -1, 0, "DT_UNDEFINED";
    /// IEEE 754 binary32.
    Float = 0, 32, "FLOAT";
    /// IEEE 754 binary16.
    Float16 = 1, 16, "FLOAT16";
    /// Signed 8-bit integer.
    Int8 = 2, 8, "INT8";
    /// Signed 32-bit integer; as key or value: eight packed `Int4`.
    Int32 = 3, 32, "INT32";
    /// Unsigned 8-bit integer.
    UInt8 = 4, 8, "UINT8";
    /// Signed 16-bit integer.
    Int16 = 6, 16, "INT16";
    /// Unsigned 16-bit integer.
    UInt16 = 7, 16, "UINT16";
    /// Unsigned 32-bit integer.
    UInt32 = 8, 32, "UINT32";
    /// Signed 64-bit integer.
    Int64 = 9, 64, "INT64";
    /// Unsigned 64-bit integer.
    UInt64 = 10, 64, "UINT64";
    /// IEEE 754 binary64.
    Double = 11, 64, "DOUBLE";
    /// One byte, 0 or 1.
    Bool = 12, 8, "BOOL";
    /// Character string; no fixed size.
    String = 13, 0, "STRING";
    /// Two binary32.
    Complex64 = 16, 64, "COMPLEX64";
    /// Two binary64.
    Complex128 = 17, 128, "COMPLEX128";
    /// bfloat16: the upper half of a binary32.
    Bf16 = 27, 16, "BF16";
    /// Signed 4-bit integer, two in a byte.
    Int4 = 29, 4, "INT4";
    /// One bit.
    UInt1 = 30, 1, "UINT1";
    /// Two binary16.
    Complex32 = 33, 32, "COMPLEX32";
    /// Huawei's 8-bit float with tapered exponent.
    HiFloat8 = 34, 8, "HIFLOAT8";
    /// 8-bit float, 5 exponent bits.
    Float8E5M2 = 35, 8, "FLOAT8_E5M2";
    /// 8-bit float, 4 exponent bits, finite only.
    Float8E4M3Fn = 36, 8, "FLOAT8_E4M3FN";
    /// 8-bit power-of-two scale.
    Float8E8M0 = 37, 8, "FLOAT8_E8M0";
    /// 6-bit float, 3 exponent bits.
    Float6E3M2 = 38, 6, "FLOAT6_E3M2";
    /// 6-bit float, 2 exponent bits.
    Float6E2M3 = 39, 6, "FLOAT6_E2M3";
    /// 4-bit float, 2 exponent bits.
    Float4E2M1 = 40, 4, "FLOAT4_E2M1";
    /// 4-bit float, 1 exponent bit.
    Float4E1M2 = 41, 4, "FLOAT4_E1M2";
}

impl DType {
    /// CANN's number (`aclDataType`).
    pub const fn acl(self) -> i32 {
        self as i32
    }

    /// Bytes of one element, or `None` for types smaller than a byte or without a fixed size.
    pub const fn size(self) -> Option<usize> {
        let bits = self.bits();
        if bits >= 8 && bits.is_multiple_of(8) { Some(bits as usize / 8) } else { None }
    }

    /// Bytes that `elements` packed elements take, rounded up to whole bytes; `None` on overflow or without a fixed
    /// size.
    pub const fn bytes_for(self, elements: u64) -> Option<u64> {
        let bits = self.bits() as u64;
        if bits == 0 {
            return None;
        }
        match elements.checked_mul(bits) {
            Some(total) => Some(total.div_ceil(8)),
            None => None,
        }
    }

    /// The type that a name stands for, in any case: CANN's own name (`FLOAT16`, `BF16`), the name that frameworks use
    /// (`float16`, `bfloat16`, `float32`) or that of safetensors files (`F16`, `F32`, `I8`, `U64`, `F8_E4M3`).
    pub fn from_name(name: &str) -> Option<Self> {
        let alias = [
            ("float32", DType::Float),
            ("bfloat16", DType::Bf16),
            ("float64", DType::Double),
            ("F64", DType::Double),
            ("F32", DType::Float),
            ("F16", DType::Float16),
            ("I64", DType::Int64),
            ("I32", DType::Int32),
            ("I16", DType::Int16),
            ("I8", DType::Int8),
            ("U64", DType::UInt64),
            ("U32", DType::UInt32),
            ("U16", DType::UInt16),
            ("U8", DType::UInt8),
            ("C64", DType::Complex64),
            ("F8_E4M3", DType::Float8E4M3Fn),
            ("F8_E5M2", DType::Float8E5M2),
            ("F8_E8M0", DType::Float8E8M0),
            ("F6_E3M2", DType::Float6E3M2),
            ("F6_E2M3", DType::Float6E2M3),
            ("F4", DType::Float4E2M1),
        ];
        DType::ALL
            .iter()
            .find(|dtype| dtype.name().eq_ignore_ascii_case(name))
            .copied()
            .or_else(|| alias.iter().find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|&(_, dtype)| dtype))
    }

    /// Whether this is `Float16` or `Bf16`, the types attention computes in without quantisation.
    pub const fn is_half(self) -> bool {
        matches!(self, DType::Float16 | DType::Bf16)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Dtypes as a list in a message.
pub(crate) struct Names<'a>(pub(crate) &'a [DType]);

impl fmt::Display for Names<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, dtype) in self.0.iter().enumerate() {
            write!(f, "{}{dtype}", if index > 0 { ", " } else { "" })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_round_trip() {
        for &dtype in DType::ALL {
            assert_eq!(DType::from_acl(dtype.acl()), Some(dtype));
            assert_eq!(DType::from_name(dtype.name()), Some(dtype));
        }
        for hole in [5, 14, 15, 18, 26, 28, 31, 32, 42, -2, i32::MAX, i32::MIN] {
            assert_eq!(DType::from_acl(hole), None);
        }
    }

    #[test]
    fn framework_names_are_known() {
        assert_eq!(DType::from_name("bfloat16"), Some(DType::Bf16));
        assert_eq!(DType::from_name("float32"), Some(DType::Float));
        assert_eq!(DType::from_name("int4"), Some(DType::Int4));
        for (name, dtype) in [
            ("F64", DType::Double),
            ("F32", DType::Float),
            ("F16", DType::Float16),
            ("BF16", DType::Bf16),
            ("I64", DType::Int64),
            ("I32", DType::Int32),
            ("I16", DType::Int16),
            ("I8", DType::Int8),
            ("U64", DType::UInt64),
            ("U32", DType::UInt32),
            ("U16", DType::UInt16),
            ("U8", DType::UInt8),
            ("BOOL", DType::Bool),
            ("C64", DType::Complex64),
            ("F8_E4M3", DType::Float8E4M3Fn),
            ("F8_E5M2", DType::Float8E5M2),
            ("F8_E8M0", DType::Float8E8M0),
            ("F4", DType::Float4E2M1),
            ("f16", DType::Float16),
        ] {
            assert_eq!(DType::from_name(name), Some(dtype), "{name}");
        }
        assert_eq!(DType::from_name("half"), None);
    }

    #[test]
    fn sizes_round_up_and_never_overflow() {
        assert_eq!(DType::Int4.size(), None);
        assert_eq!(DType::Int4.bytes_for(3), Some(2));
        assert_eq!(DType::Bf16.size(), Some(2));
        assert_eq!(DType::Bool.bytes_for(7), Some(7));
        assert_eq!(DType::Double.bytes_for(u64::MAX), None);
        assert_eq!(DType::String.bytes_for(1), None);
    }
}
