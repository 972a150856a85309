//! A mask: sparse mode, tensor and window, always together.

use ascend_spec::SparseMode;
use ascend_spec::ops::fused_infer_attention_score::FiaCall;

use crate::tensor::AnyTensor;

/// Which keys a query sees: CANN's `sparseMode`, `attenMask`, `preTokens` and `nextTokens`, which mean something only
/// together.
///
/// A mask tensor is BOOL, INT8 or UINT8; 1 hides. Cloning shares the tensor.
#[derive(Clone, Debug)]
#[must_use = "a mask that no call is given hides nothing"]
pub struct Mask {
    sparse_mode: SparseMode,
    tensor: Option<AnyTensor>,
    pre_tokens: i64,
    next_tokens: i64,
}

impl Mask {
    /// A count of tokens that stands for no bound.
    pub const ALL_TOKENS: i64 = FiaCall::ALL_TOKENS;

    /// Every query sees every key (sparse mode 0 without a tensor).
    pub fn none() -> Self {
        Self::new(SparseMode::DefaultMask, None)
    }

    /// A query sees the keys where the tensor is 0 (sparse mode 1). Shape `[Sq, Skv]`, `[B, Sq, Skv]` or
    /// `[B, 1, Sq, Skv]`, where B may be 1 and Sq and Skv may be larger; with one query row a sequence `[B, Skv]`,
    /// `[B, 1, Skv]` or `[B, 1, 1, Skv]`.
    #[inline]
    pub fn all_mask(tensor: impl Into<AnyTensor>) -> Self {
        Self::new(SparseMode::AllMask, Some(tensor.into()))
    }

    /// Query row `i` sees the keys `i - pre_tokens ..= i + next_tokens` where the tensor is 0 (sparse mode 0 with a
    /// tensor, shaped as for [`Mask::all_mask`]). Rows and keys are counted from the first.
    pub fn default_mask(tensor: impl Into<AnyTensor>, pre_tokens: i64, next_tokens: i64) -> Self {
        Self::new(SparseMode::DefaultMask, Some(tensor.into())).window(pre_tokens, next_tokens)
    }

    /// A query among the last `Sq` keys sees those of them where the tensor is 0, and all keys before them (sparse
    /// mode 9): drafts after a context. [`Masks::drafts`](super::Masks::drafts) makes such a tensor, and documents
    /// its shapes.
    pub fn tree_mask(tensor: impl Into<AnyTensor>) -> Self {
        Self::compressed(SparseMode::Tree, tensor.into())
    }

    /// A mode that derives the rest from the lengths, with the tensor that it takes.
    pub(crate) fn compressed(mode: SparseMode, tensor: AnyTensor) -> Self {
        Self::new(mode, Some(tensor))
    }

    fn new(sparse_mode: SparseMode, tensor: Option<AnyTensor>) -> Self {
        Self { sparse_mode, tensor, pre_tokens: Self::ALL_TOKENS, next_tokens: Self::ALL_TOKENS }
    }

    pub(crate) fn window(mut self, pre_tokens: i64, next_tokens: i64) -> Self {
        (self.pre_tokens, self.next_tokens) = (pre_tokens, next_tokens);
        self
    }

    /// CANN's `sparseMode`.
    pub fn sparse_mode(&self) -> SparseMode {
        self.sparse_mode
    }

    /// CANN's `attenMask`.
    pub fn tensor(&self) -> Option<&AnyTensor> {
        self.tensor.as_ref()
    }

    /// Bytes of device memory that the tensor's elements take: 4 MiB for a compressed mask of any length, the product
    /// of rows and keys for a full one, nothing without a tensor. Masks from the cache share them.
    pub fn tensor_bytes(&self) -> usize {
        let bytes = |tensor: &AnyTensor| tensor.addresses().len();
        self.tensor.as_ref().map_or(0, bytes)
    }

    /// CANN's `preTokens`: keys visible before the diagonal.
    pub fn pre_tokens(&self) -> i64 {
        self.pre_tokens
    }

    /// CANN's `nextTokens`: keys visible after the diagonal.
    pub fn next_tokens(&self) -> i64 {
        self.next_tokens
    }
}

impl Default for Mask {
    fn default() -> Self {
        Self::none()
    }
}
