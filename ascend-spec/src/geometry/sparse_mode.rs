//! `sparseMode`: what the mask tensor and the token window mean, and which operator takes which mode.

use std::fmt;

/// The sparse modes of CANN's attention operators. The discriminant is CANN's attribute value.
///
/// `i` is a query row, `j` a key, `Sq` and `Skv` the actual lengths of one sequence (`Skv` counts a shared prefix
/// too). [`Operator::sparse_modes`] lists the modes that an operator takes; [`MaskGeometry`](crate::MaskGeometry) and
/// [`Sparsity`](crate::Sparsity) compute what a row sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum SparseMode {
    /// A row sees every key without a mask tensor, and with one the keys of the band `i - pre <= j <= i + next` where
    /// the tensor is 0.
    DefaultMask = 0,
    /// A row sees the keys where the tensor is 0; a full tensor is required.
    AllMask = 1,
    /// `j <= i`; takes the compressed 2048 x 2048 tensor.
    LeftUpCausal = 2,
    /// `j <= i + Skv - Sq`; takes the compressed tensor.
    RightDownCausal = 3,
    /// `i + Skv - Sq - pre <= j <= i + Skv - Sq + next`; takes the compressed tensor.
    Band = 4,
    /// `j <= i + Skv - Sq`, or `j < prefix[b]`; takes a full tensor of that content. Not for packed sequences.
    Prefix = 5,
    /// `j <= i + Skv - Sq`, or `j < prefix[b]`; takes the compressed 3072 x 2048 tensor. Not for packed sequences.
    PrefixCompress = 6,
    /// Mode 3, but the last sequence that has rows is a band: the first rows of a sequence that was cut. Packed
    /// sequences alone; takes the compressed 2048 x 2048 tensor.
    RightDownCausalBand = 7,
    /// Mode 2, but the first sequence that has rows is a band: the last rows of a sequence that was cut. Packed
    /// sequences alone; takes the compressed 2048 x 2048 tensor.
    BandLeftUpCausal = 8,
    /// `j < Skv - Sq`, or where the tensor is 0 at column `j - (Skv - Sq)`: a tree of `Sq` draft tokens after a
    /// context that all of them see. Inference with rotary parts alone; takes a tensor of the drafts.
    Tree = 9,
}

impl SparseMode {
    /// Every mode.
    pub const ALL: [SparseMode; 10] = [
        SparseMode::DefaultMask,
        SparseMode::AllMask,
        SparseMode::LeftUpCausal,
        SparseMode::RightDownCausal,
        SparseMode::Band,
        SparseMode::Prefix,
        SparseMode::PrefixCompress,
        SparseMode::RightDownCausalBand,
        SparseMode::BandLeftUpCausal,
        SparseMode::Tree,
    ];

    /// Rows and columns of the compressed mask that modes 2, 3, 4, 7 and 8 take.
    pub const COMPRESSED_MASK_SIZE: i64 = 2048;

    /// The mode with CANN's number `value`, or `None` if no operator has such a mode.
    pub fn from_acl(value: i64) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.acl() == value)
    }

    /// CANN's number.
    pub const fn acl(self) -> i64 {
        self as i64
    }

    /// CANN's name.
    pub const fn name(self) -> &'static str {
        match self {
            SparseMode::DefaultMask => "defaultMask",
            SparseMode::AllMask => "allMask",
            SparseMode::LeftUpCausal => "leftUpCausal",
            SparseMode::RightDownCausal => "rightDownCausal",
            SparseMode::Band => "band",
            SparseMode::Prefix => "prefix",
            SparseMode::PrefixCompress => "prefixCompress",
            SparseMode::RightDownCausalBand => "rightDownCausalBand",
            SparseMode::BandLeftUpCausal => "bandLeftUpCausal",
            SparseMode::Tree => "treeMask",
        }
    }

    /// What a row sees, as CANN's documents write it: row `i`, key `j`, lengths `Sq` and `Skv`.
    pub const fn formula(self) -> &'static str {
        match self {
            SparseMode::DefaultMask => {
                "every key without a tensor; with one, i - preTokens <= j <= i + nextTokens where the tensor is 0"
            }
            SparseMode::AllMask => "where the tensor is 0",
            SparseMode::LeftUpCausal => "j <= i",
            SparseMode::RightDownCausal => "j <= i + Skv - Sq",
            SparseMode::Band => "i + Skv - Sq - preTokens <= j <= i + Skv - Sq + nextTokens",
            SparseMode::Prefix | SparseMode::PrefixCompress => "j <= i + Skv - Sq, or j < prefix",
            SparseMode::RightDownCausalBand => {
                "the band of mode 4 in the last sequence that has rows, j <= i + Skv - Sq in the others"
            }
            SparseMode::BandLeftUpCausal => {
                "the band of mode 4 in the first sequence that has rows, j <= i in the others"
            }
            SparseMode::Tree => "j < Skv - Sq, or where the tensor is 0 at column j - (Skv - Sq)",
        }
    }

    /// Content of the compressed causal mask: whether row `i` hides column `j` (a strict upper triangle).
    pub const fn compressed_mask_hides(i: i64, j: i64) -> bool {
        j > i
    }

    /// Whether the mode reads `preTokens` and `nextTokens`, given whether there is a mask tensor.
    pub const fn reads_tokens(self, has_tensor: bool) -> bool {
        match self {
            SparseMode::DefaultMask => has_tensor,
            SparseMode::Band | SparseMode::RightDownCausalBand | SparseMode::BandLeftUpCausal => true,
            _ => false,
        }
    }

    /// The mode of one sequence, given whether it is the cut one of modes 7 and 8: the others are causal.
    #[must_use]
    pub const fn of_sequence(self, is_cut: bool) -> SparseMode {
        match self {
            SparseMode::RightDownCausalBand if !is_cut => SparseMode::RightDownCausal,
            SparseMode::BandLeftUpCausal if !is_cut => SparseMode::LeftUpCausal,
            mode => mode,
        }
    }

    /// Whether the mode reads `prefix`.
    pub const fn reads_prefix(self) -> bool {
        matches!(self, SparseMode::Prefix | SparseMode::PrefixCompress)
    }
}

impl fmt::Display for SparseMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.acl(), self.name())
    }
}

/// The attention operators that have a `sparseMode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operator {
    /// `aclnnFusedInferAttentionScore`, every version.
    FusedInferAttentionScore,
    /// `aclnnPromptFlashAttention` from V2 on.
    PromptFlashAttention,
    /// `aclnnFlashAttentionScore`: the training operator with a batch axis.
    FlashAttentionScore,
    /// `aclnnFlashAttentionVarLenScore`: the training operator for packed sequences.
    FlashAttentionVarLenScore,
}

impl Operator {
    /// Every operator.
    pub const ALL: [Operator; 4] = [
        Operator::FusedInferAttentionScore,
        Operator::PromptFlashAttention,
        Operator::FlashAttentionScore,
        Operator::FlashAttentionVarLenScore,
    ];

    /// CANN's function.
    pub const fn symbol(self) -> &'static str {
        match self {
            Operator::FusedInferAttentionScore => "aclnnFusedInferAttentionScore",
            Operator::PromptFlashAttention => "aclnnPromptFlashAttention",
            Operator::FlashAttentionScore => "aclnnFlashAttentionScore",
            Operator::FlashAttentionVarLenScore => "aclnnFlashAttentionVarLenScore",
        }
    }

    /// The modes that the operator takes.
    ///
    /// Source: `sparseMode` in the documents of the four operators.
    pub const fn sparse_modes(self) -> &'static [SparseMode] {
        use SparseMode as M;
        match self {
            Operator::FusedInferAttentionScore | Operator::PromptFlashAttention => {
                &[M::DefaultMask, M::AllMask, M::LeftUpCausal, M::RightDownCausal, M::Band]
            }
            Operator::FlashAttentionScore => &[
                M::DefaultMask,
                M::AllMask,
                M::LeftUpCausal,
                M::RightDownCausal,
                M::Band,
                M::Prefix,
                M::PrefixCompress,
            ],
            Operator::FlashAttentionVarLenScore => &[
                M::DefaultMask,
                M::AllMask,
                M::LeftUpCausal,
                M::RightDownCausal,
                M::Band,
                M::PrefixCompress,
                M::RightDownCausalBand,
                M::BandLeftUpCausal,
            ],
        }
    }

    /// The mode with CANN's number `value`, or `None` if the operator takes no such mode.
    pub fn sparse_mode(self, value: i64) -> Option<SparseMode> {
        let taken = |mode: &SparseMode| mode.acl() == value;
        self.sparse_modes().iter().copied().find(taken)
    }
}

impl fmt::Display for Operator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.symbol())
    }
}

/// The value above which CANN's tiling clamps `preTokens` and `nextTokens` (214748647, not `i32::MAX`).
///
/// Sequences are shorter than this, so a clamped token count means "no bound".
pub const TOKENS_UNBOUNDED: i64 = 214_748_647;

/// Stands for no bound on the distance from the diagonal; far above every length, far from overflow.
pub(super) const FAR: i64 = 1 << 60;

/// The greatest length that is distinguished; longer ones count as this.
pub(super) const LONGEST: i64 = FAR / 2;

/// A length as a signed number, small enough that sums of several do not overflow.
pub(super) fn clamp_len(len: u64) -> i64 {
    i64::try_from(len).unwrap_or(i64::MAX).min(LONGEST)
}

/// `preTokens` as the distance of the band's first key.
pub(super) fn lower(pre_tokens: i64) -> i64 {
    if pre_tokens >= TOKENS_UNBOUNDED { -FAR } else { pre_tokens.max(-FAR).saturating_neg() }
}

/// `nextTokens` as the distance of the band's last key.
pub(super) fn upper(next_tokens: i64) -> i64 {
    if next_tokens >= TOKENS_UNBOUNDED { FAR } else { next_tokens.max(-FAR) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_cann() {
        for (number, mode) in SparseMode::ALL.into_iter().enumerate() {
            assert_eq!(mode.acl(), number as i64);
            assert_eq!(SparseMode::from_acl(number as i64), Some(mode));
        }
        for other in [-1, 10, i64::MIN, i64::MAX] {
            assert_eq!(SparseMode::from_acl(other), None);
        }
    }

    #[test]
    fn each_operator_takes_its_modes() {
        let taken = |operator: Operator| -> Vec<i64> {
            (-1..11).filter(|&value| operator.sparse_mode(value).is_some()).collect()
        };
        assert_eq!(taken(Operator::FusedInferAttentionScore), [0, 1, 2, 3, 4]);
        assert_eq!(taken(Operator::PromptFlashAttention), [0, 1, 2, 3, 4]);
        assert_eq!(taken(Operator::FlashAttentionScore), [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(taken(Operator::FlashAttentionVarLenScore), [0, 1, 2, 3, 4, 6, 7, 8]);
    }
}
