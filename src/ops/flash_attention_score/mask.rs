//! Which keys a row sees, in the sparse modes of training.

use ascend_spec::geometry::CutSide;
use ascend_spec::ops::flash_attention_score::FlashAttentionCall;
use ascend_spec::{CompressedMask, SparseMode};

use crate::error::Result;
use crate::mask::{CausalOrigin, Mask, MaskForm, Masks, SlidingWindow};
use crate::operator::Lengths;
use crate::tensor::AnyTensor;

/// Which keys a row sees: CANN's `sparseMode`, `attenMask`, `preTokens`, `nextTokens` and `prefix`, which mean
/// something only together.
///
/// Row `i` and key `j` are counted within their sequence, Sq rows and Skv keys. A mask tensor is BOOL or UINT8, 1
/// hides: INT8, which [`Masks`] makes for inference on Atlas A2 and A3, is refused by `flash.atten_mask_dtype`, so
/// that compressed masks come from here. A [`Mask`] of a full tensor of these types becomes one of these by `into`.
/// Cloning shares the tensor.
///
/// | mode | row `i` sees | made by |
/// |---|---|---|
/// | 0 without a tensor | every key | [`FlashMask::none`] |
/// | 0, 1 | what a full tensor shows | `Mask::default_mask`, `Mask::all_mask` with `into` |
/// | 2, 3 | `j <= i`, `j <= i + Skv - Sq` | [`FlashMask::causal`] |
/// | 4 | a band from the last row and key | [`FlashMask::band`], [`FlashMask::sliding_window`] |
/// | 5, 6 | `j < prefix` or `j <= i + Skv - Sq` | [`FlashMask::prefix_matrix`], [`FlashMask::prefix`] |
/// | 7 | packed: the last sequence is a band, the others causal | [`FlashMask::cut`], [`FlashMask::last_cut`] |
/// | 8 | packed: the first sequence is a band, the others causal | [`FlashMask::cut`], [`FlashMask::first_cut`] |
#[derive(Clone, Debug, Default)]
#[must_use = "a mask that no call is given hides nothing"]
pub struct FlashMask {
    mask: Mask,
    prefix: Option<Lengths>,
}

impl FlashMask {
    /// Every row sees every key: sparse mode 0 without a tensor.
    pub fn none() -> Self {
        Self::default()
    }

    /// A row sees the keys up to its own place: sparse mode 2 or 3.
    ///
    /// # Errors
    /// As for [`Stream::upload`](crate::Stream::upload).
    pub fn causal(masks: &Masks<'_>, origin: CausalOrigin) -> Result<Self> {
        let mode = match origin {
            CausalOrigin::LeftUp => SparseMode::LeftUpCausal,
            CausalOrigin::RightDown => SparseMode::RightDownCausal,
        };
        Ok(Self::compressed(masks, mode)?.into())
    }

    /// `i + Skv - Sq - pre_tokens <= j <= i + Skv - Sq + next_tokens`: sparse mode 4.
    ///
    /// # Errors
    /// As for [`Stream::upload`](crate::Stream::upload).
    pub fn band(masks: &Masks<'_>, pre_tokens: i64, next_tokens: i64) -> Result<Self> {
        let mask = Self::compressed(masks, SparseMode::Band)?;
        Ok(mask.window(pre_tokens, next_tokens).into())
    }

    /// A causal window: sparse mode 4.
    ///
    /// # Errors
    /// As for [`Stream::upload`](crate::Stream::upload).
    pub fn sliding_window(masks: &Masks<'_>, window: SlidingWindow) -> Result<Self> {
        Self::band(masks, window.pre_tokens(), 0)
    }

    /// A row sees the first keys of its sequence, as many as the sequence's entry of `prefix`, and those up to its
    /// own place: sparse mode 6, whose compressed mask serves every length. An entry for each sequence, from
    /// `Skv - Sq` (or 0) to `Skv`.
    ///
    /// # Errors
    /// As for [`Stream::upload`](crate::Stream::upload).
    pub fn prefix(masks: &Masks<'_>, prefix: impl Into<Vec<usize>>) -> Result<Self> {
        let mask = Self::compressed(masks, SparseMode::PrefixCompress)?;
        Ok(Self { mask, prefix: Some(Lengths::new("prefix", prefix.into())) })
    }

    /// As [`FlashMask::prefix`], but by a full tensor for each sequence, `[B, 1, Sq, Skv]` or `[B, N, Sq, Skv]`: sparse
    /// mode 5, which goes with a batch axis. The tensor has to hide what the prefix hides: the operator leaves out
    /// whole blocks by the prefix, and uses the tensor alone elsewhere. A plan does not check this, because the tensor
    /// is on the device: [`Plan::check_contents`](crate::operation::Plan::check_contents) does.
    pub fn prefix_matrix(tensor: impl Into<AnyTensor>, prefix: impl Into<Vec<usize>>) -> Self {
        let mask = Mask::compressed(SparseMode::Prefix, tensor.into());
        Self { mask, prefix: Some(Lengths::new("prefix", prefix.into())) }
    }

    /// Packed sequences, each causal from its last row and key (as [`CausalOrigin::RightDown`]). The last sequence
    /// with rows is cut: in it row `i` sees `i + Skv - Sq - pre_tokens <= j <= i + Skv - Sq + next_tokens`. Sparse
    /// mode 7: a rank of a ring whose last sequence goes on in the next rank's rows. `pre_tokens` is at least that
    /// sequence's keys, `next_tokens` from `Sq - Skv` to 0.
    ///
    /// # Errors
    /// As for [`Stream::upload`](crate::Stream::upload).
    pub fn last_cut(masks: &Masks<'_>, pre_tokens: i64, next_tokens: i64) -> Result<Self> {
        let mask = Self::compressed(masks, SparseMode::RightDownCausalBand)?;
        Ok(mask.window(pre_tokens, next_tokens).into())
    }

    /// Packed sequences, each causal from its first row and key (as [`CausalOrigin::LeftUp`]). The first sequence
    /// with rows is cut: in it row `i` sees the band of [`FlashMask::last_cut`]. Sparse mode 8: a rank of a ring
    /// whose first sequence has begun in the previous rank's rows. `pre_tokens` is at least that sequence's keys,
    /// `next_tokens` at least `Sq - Skv`.
    ///
    /// # Errors
    /// As for [`Stream::upload`](crate::Stream::upload).
    pub fn first_cut(masks: &Masks<'_>, pre_tokens: i64, next_tokens: i64) -> Result<Self> {
        let mask = Self::compressed(masks, SparseMode::BandLeftUpCausal)?;
        Ok(mask.window(pre_tokens, next_tokens).into())
    }

    /// The mask of one card of packed sequences that are divided between two, whose lengths the call has too: sparse
    /// mode 7 or 8. [`CutBatch`](super::CutBatch) makes both of the whole call's lengths.
    ///
    /// # Errors
    /// As for [`Stream::upload`](crate::Stream::upload).
    pub fn cut(masks: &Masks<'_>, side: &CutSide) -> Result<Self> {
        Ok(Self::compressed(masks, side.mode)?.window(side.pre_tokens, side.next_tokens).into())
    }

    fn compressed(masks: &Masks<'_>, sparse_mode: SparseMode) -> Result<Mask> {
        let template = match sparse_mode {
            SparseMode::PrefixCompress => CompressedMask::Prefix,
            _ => CompressedMask::Causal,
        };
        Ok(Mask::compressed(sparse_mode, masks.template(template, MaskForm::BOOL)?))
    }

    /// CANN's `sparseMode`.
    pub fn sparse_mode(&self) -> SparseMode {
        self.mask.sparse_mode()
    }

    /// CANN's `attenMask`.
    pub fn tensor(&self) -> Option<&AnyTensor> {
        self.mask.tensor()
    }

    /// Writes the mask into a call.
    pub(super) fn describe<'c>(&'c self, call: &mut FlashAttentionCall<'c>) -> Result<()> {
        call.atten_mask = self.tensor().map(|tensor| *tensor.desc());
        call.sparse_mode = self.sparse_mode().acl();
        (call.pre_tokens, call.next_tokens) = (self.mask.pre_tokens(), self.mask.next_tokens());
        call.prefix = Lengths::given(&self.prefix)?;
        Ok(())
    }
}

impl From<Mask> for FlashMask {
    fn from(mask: Mask) -> Self {
        Self { mask, prefix: None }
    }
}
