//! Dropout.

use ascend_spec::ops::flash_attention_score::FlashAttentionProblem;

use crate::error::{Error, Result};
use crate::memory::zeros;
use crate::runtime::Stream;
use crate::tensor::Tensor;

/// Which probabilities are dropped, and the share of them that is kept (`dropMask`, `keepProb`): what is kept is
/// divided by that share.
///
/// The mask has a bit for each score, 1 keeps it, in the order `[B, N, Sq, Skv]`; for packed sequences `[N, Sq, Skv]`
/// of each sequence, one after the other without padding. The maxima and sums of the rows are those before dropout.
/// Without a dropout nothing is dropped. Cloning shares the mask.
#[derive(Clone, Debug)]
pub struct Dropout {
    mask: Tensor<u8>,
    keep_prob: f64,
    /// Number of scores that the mask was made for; `None` if that is not known.
    scores: Option<u64>,
}

impl Dropout {
    /// Packs whether each score is kept, in the order that [`Dropout`] describes, and copies it to the device. A call
    /// with another number of scores is refused.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a share that is not above 0 and at most 1, and no score;
    /// otherwise as for [`Stream::upload`].
    pub fn new(stream: &Stream, keeps: impl ExactSizeIterator<Item = bool>, keep_prob: f64) -> Result<Self> {
        let bits = keeps.len();
        let bytes = FlashAttentionProblem::drop_mask_bytes(bits as u64);
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        if bits == 0 {
            return Err(Error::invalid("keeps", "no score", "at least one").fix("keep the scores of at least one key"));
        }
        let mut packed = zeros(bytes)?;
        for (bit, _) in keeps.enumerate().filter(|(_, keep)| *keep) {
            if let Some(byte) = packed.get_mut(bit / 8) {
                *byte |= 1 << (bit % 8);
            }
        }
        let dropout = Self::from_tensor(stream.upload(&packed, [bytes])?, keep_prob)?;
        Ok(Self { scores: Some(bits as u64), ..dropout })
    }

    /// A mask that is on the device already, of any shape, with at least [`Dropout::bytes`] bytes: a call with a
    /// smaller one is refused.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a share that is not above 0 and at most 1.
    pub fn from_tensor(mask: Tensor<u8>, keep_prob: f64) -> Result<Self> {
        if !(keep_prob > 0.0 && keep_prob <= 1.0) {
            return Err(Error::invalid("keep_prob", keep_prob, "above 0 and at most 1")
                .fix("leave dropout out to keep all scores"));
        }
        Ok(Self { mask, keep_prob, scores: None })
    }

    /// Bytes of a mask for `scores` scores: the operator loads 16 at once.
    pub const fn bytes(scores: u64) -> u64 {
        FlashAttentionProblem::drop_mask_bytes(scores)
    }

    /// The mask on the device.
    pub fn mask(&self) -> &Tensor<u8> {
        &self.mask
    }

    pub(super) fn scores(&self) -> Option<u64> {
        self.scores
    }

    /// The share that is kept.
    pub fn keep_prob(&self) -> f64 {
        self.keep_prob
    }
}
