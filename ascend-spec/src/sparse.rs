//! `sparseMode`: what the mask tensor and the token window mean.

use std::fmt;

/// The sparse modes that FusedInferAttentionScore takes. The discriminant is CANN's attribute value.
///
/// `i` is a query row, `j` a key, `Sq` and `Skv` the actual lengths of one batch entry (`Skv` counts a shared prefix too).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum SparseMode {
    /// Without a mask tensor: everything. With one: the band `i - pre <= j <= i + next` where the tensor is 0.
    DefaultMask = 0,
    /// Where the tensor is 0; a full tensor is required.
    AllMask = 1,
    /// `j <= i`; takes the compressed 2048 x 2048 tensor.
    LeftUpCausal = 2,
    /// `j <= i + Skv - Sq`; takes the compressed tensor.
    RightDownCausal = 3,
    /// `i + Skv - Sq - pre <= j <= i + Skv - Sq + next`; takes the compressed tensor.
    Band = 4,
}

impl SparseMode {
    /// Every mode the operator takes.
    pub const ALL: [SparseMode; 5] = [
        SparseMode::DefaultMask,
        SparseMode::AllMask,
        SparseMode::LeftUpCausal,
        SparseMode::RightDownCausal,
        SparseMode::Band,
    ];

    /// Rows and columns of the compressed mask that modes 2, 3 and 4 take.
    pub const COMPRESSED_MASK_SIZE: i64 = 2048;

    /// The mode with CANN's number `value`, or `None` if the operator takes no such mode.
    pub fn from_acl(value: i64) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.acl() == value)
    }

    /// CANN's number.
    pub const fn acl(self) -> i64 {
        self as i64
    }

    /// Whether the mode takes the compressed mask rather than a full one.
    pub const fn takes_compressed_mask(self) -> bool {
        matches!(
            self,
            SparseMode::LeftUpCausal | SparseMode::RightDownCausal | SparseMode::Band
        )
    }

    /// Content of the compressed mask: whether row `i` hides column `j` (a strict upper triangle).
    pub const fn compressed_mask_hides(i: i64, j: i64) -> bool {
        j > i
    }
}

impl fmt::Display for SparseMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            SparseMode::DefaultMask => "defaultMask",
            SparseMode::AllMask => "allMask",
            SparseMode::LeftUpCausal => "leftUpCausal",
            SparseMode::RightDownCausal => "rightDownCausal",
            SparseMode::Band => "band",
        };
        write!(f, "{} ({name})", self.acl())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_five_modes_are_taken() {
        for mode in SparseMode::ALL {
            assert_eq!(SparseMode::from_acl(mode.acl()), Some(mode));
        }
        for other in [-1, 5, 6, 7, 8, 9, i64::MIN, i64::MAX] {
            assert_eq!(SparseMode::from_acl(other), None);
        }
    }
}
