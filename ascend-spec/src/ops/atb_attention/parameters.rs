//! The parameters by which an operation of ATB is made, before there is a tensor.

use super::Version;
use super::rules::{HEADS, PREFIX, PRODUCT, SCALE, TRIANGLE};
use crate::rule::require;
use crate::{Soc, Target, Violation};

/// The parameters that ATB checks when an operation is made, of those whose values the emulation computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OperationParameters {
    /// The operator, in one of its forms.
    pub version: Version,
    /// `headNum`.
    pub heads: i32,
    /// `kvHeadNum`.
    pub kv_heads: i32,
    /// `qkScale`.
    pub scale: f32,
    /// Whether `maskType` names a mask.
    pub masked: bool,
    /// Whether `isTriuMask` is 1.
    pub triangle: bool,
    /// Whether `kernelType` is 1: high precision.
    pub precise: bool,
    /// Whether `outDataType` is not -1.
    pub other_output: bool,
    /// Whether `clampMin` or `clampMax` is not 0.
    pub clamped: bool,
}

impl OperationParameters {
    /// Checks what ATB's `CreateOperation` checks.
    ///
    /// # Errors
    /// The rule that the parameters break.
    pub fn check(&self, target: Target) -> Result<(), Violation> {
        check_heads(self.heads.into(), self.kv_heads.into())?;
        match self.version {
            Version::Paged => require!(
                target.soc != Soc::Ascend950 || self.scale > 0.0 && self.scale <= 1.0,
                SCALE,
                self.scale,
                "more than 0, at most 1",
            ),
            Version::Packed | Version::Prefix => {
                require!(self.masked || !self.triangle, TRIANGLE, "isTriuMask 1 with maskType 0", "isTriuMask 0",)
            }
        }
        if self.version == Version::Prefix {
            check_prefix_product(target)?;
            require!(
                self.triangle && self.precise && !self.other_output && !self.clamped,
                PREFIX,
                format_args!(
                    "isTriuMask {}, kernelType {}, outDataType {}, clampMin and clampMax {}",
                    i32::from(self.triangle),
                    i32::from(self.precise),
                    if self.other_output { "a type" } else { "-1" },
                    if self.clamped { "not 0" } else { "0" },
                ),
                "isTriuMask 1, kernelType 1, outDataType -1, clampMin and clampMax 0",
            );
        }
        Ok(())
    }
}

/// Checks the numbers of heads.
pub(super) fn check_heads(heads: i64, kv_heads: i64) -> Result<(), Violation> {
    require!(
        heads > 0 && kv_heads >= 0 && (kv_heads == 0 || heads % kv_heads == 0),
        HEADS,
        format_args!("headNum {heads} and kvHeadNum {kv_heads}"),
        "headNum of at least 1, and kvHeadNum 0 or a divisor of it",
    );
    Ok(())
}

/// Checks that a product has `PREFIX_ENCODER`.
pub(super) fn check_prefix_product(target: Target) -> Result<(), Violation> {
    require!(matches!(target.soc, Soc::AtlasA2 | Soc::AtlasA3), PRODUCT, target.soc, "Atlas A2 and A3",);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_create_operation_refuses() {
        let taken = OperationParameters {
            version: Version::Prefix,
            heads: 8,
            kv_heads: 2,
            scale: 1.0,
            masked: true,
            triangle: true,
            precise: true,
            other_output: false,
            clamped: false,
        };
        let packed = OperationParameters { version: Version::Packed, ..taken };
        let paged = OperationParameters { version: Version::Paged, scale: 2.0, ..taken };
        let (a2, other) = (Target::snapshot(Soc::AtlasA2), Target::snapshot(Soc::Ascend950));
        for call in [taken, packed, paged] {
            assert_eq!(call.check(a2), Ok(()));
        }
        let refused = [
            (OperationParameters { heads: 0, ..taken }, a2, "atb.heads"),
            (OperationParameters { heads: -1, ..paged }, a2, "atb.heads"),
            (OperationParameters { kv_heads: -1, ..taken }, a2, "atb.heads"),
            (OperationParameters { kv_heads: 3, ..packed }, a2, "atb.heads"),
            (OperationParameters { masked: false, ..packed }, a2, "atb.triangle"),
            (OperationParameters { triangle: false, ..taken }, a2, "atb.prefix"),
            (OperationParameters { precise: false, ..taken }, a2, "atb.prefix"),
            (OperationParameters { other_output: true, ..taken }, a2, "atb.prefix"),
            (OperationParameters { clamped: true, ..taken }, a2, "atb.prefix"),
            (taken, other, "atb.product"),
            (paged, other, "atb.scale"),
        ];
        for (call, target, id) in refused {
            let refusal = call.check(target).map_err(|refusal| refusal.rule.id);
            assert_eq!(refusal, Err(id), "{call:?}");
        }
    }
}
