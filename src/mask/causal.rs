//! Causal masks: a query sees the keys up to its own place.

use ascend_spec::{CompressedMask, MaskGeometry, SparseMode};

use crate::error::Result;
use crate::tensor::AnyTensor;

use super::cache::{Content, MaskKey};
use super::form::MaskForm;
use super::masks::Masks;
use super::value::Mask;

/// Where the diagonal of a causal mask begins when there are more keys than queries, as with a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CausalOrigin {
    /// The first query sees the first key alone: `j <= i` (sparse mode 2).
    LeftUp,
    /// The last query sees the last key too: `j <= i + Skv - Sq` (sparse mode 3). Right for decoding and for chunks
    /// of a prompt after a cache.
    RightDown,
}

impl CausalOrigin {
    const fn mode(self) -> SparseMode {
        match self {
            Self::LeftUp => SparseMode::LeftUpCausal,
            Self::RightDown => SparseMode::RightDownCausal,
        }
    }

    /// The geometry of a mask of `rows` rows and `keys` keys.
    pub(super) fn geometry(self, rows: u64, keys: u64) -> MaskGeometry {
        MaskGeometry::new(self.mode(), true, rows, keys, 0, 0)
    }
}

/// Most elements of a causal square that serves a mask of `elements` elements: as many as the compressed masks have,
/// or 8 times the mask's. A few rows over many keys are not worth the square of the keys.
fn most_shared(elements: usize) -> usize {
    const TIMES: usize = 8;
    const SMALL: usize = (SparseMode::COMPRESSED_MASK_SIZE * SparseMode::COMPRESSED_MASK_SIZE) as usize;
    elements.saturating_mul(TIMES).max(SMALL)
}

impl Masks<'_> {
    /// A query sees the keys up to its own place: sparse mode 2 or 3 with the compressed mask. For prefill and
    /// decoding of every length.
    ///
    /// # Errors
    /// As for [`Stream::upload`](crate::Stream::upload).
    pub fn causal(&self, origin: CausalOrigin) -> Result<Mask> {
        self.mode(origin.mode())
    }

    /// The mask of a call that holds chunks of prompts and decoding rows together (chunked prefill, split-fuse):
    /// sparse mode 3 with the INT8 template, as in vLLM-Ascend.
    ///
    /// # Errors
    /// As for [`Stream::upload`](crate::Stream::upload).
    pub fn chunked_prefill(&self) -> Result<Mask> {
        self.causal(CausalOrigin::RightDown)
    }

    /// The mask of vLLM-Ascend's pooling runner: sparse mode 3 with the template in BOOL, or no mask for a model that
    /// is not causal.
    ///
    /// # Errors
    /// As for [`Stream::upload`](crate::Stream::upload).
    pub fn pooling(&self, causal: bool) -> Result<Mask> {
        if !causal {
            return Ok(self.bidirectional());
        }
        let template = self.template(CompressedMask::Causal, MaskForm::BOOL)?;
        Ok(Mask::compressed(SparseMode::RightDownCausal, template))
    }

    /// The causal mask `[512, 512]` of latent attention in prefill: `-inf` hides in f16 and 1 in every other type, as
    /// vLLM-Ascend and SGLang make it (their `f32::MIN` is `-inf` in f16; no row sees nothing, so that no softmax of
    /// it is NaN). With context parallelism the operator takes 1 in every type: [`Masks::mla_matrix`].
    ///
    /// # Errors
    /// As for [`Stream::upload`](crate::Stream::upload); [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a type
    /// that no mask has.
    pub fn mla(&self, dtype: ascend_spec::DType) -> Result<AnyTensor> {
        self.mla_matrix(match dtype {
            ascend_spec::DType::Float16 => MaskForm::infinite(dtype)?,
            _ => MaskForm::ones(dtype)?,
        })
    }

    /// The causal mask `[512, 512]` of latent attention in any form.
    ///
    /// # Errors
    /// As for [`Stream::upload`](crate::Stream::upload).
    pub fn mla_matrix(&self, form: MaskForm) -> Result<AnyTensor> {
        self.causal_matrix(CausalOrigin::LeftUp, 512, 512, form)
    }

    /// A full causal mask as a contiguous tensor `[rows, keys]` of its own. For operators without sparse modes.
    ///
    /// # Errors
    /// As for [`Stream::upload`](crate::Stream::upload).
    pub fn causal_matrix(&self, origin: CausalOrigin, rows: usize, keys: usize, form: MaskForm) -> Result<AnyTensor> {
        self.matrix(origin.geometry(rows as u64, keys as u64), form)
    }

    /// A full causal mask `[rows, keys]` as a view of one square that serves all lengths and grows by doubling: nothing
    /// is made anew for a smaller one. A mask that a square would exceed by far is a contiguous tensor of its own. The
    /// view is strided, which FusedInferAttentionScore does not take (the lint `tensor.strided`): for it there is
    /// [`Masks::causal_full`], for other operators that need packed elements [`Masks::causal_matrix`].
    ///
    /// # Errors
    /// As for [`Stream::upload`](crate::Stream::upload).
    pub fn causal_view(&self, origin: CausalOrigin, rows: usize, keys: usize, form: MaskForm) -> Result<AnyTensor> {
        let view = |tensor: AnyTensor| tensor.narrow(0, 0..rows)?.narrow(1, 0..keys);
        match self.causal_rows(origin, rows, keys, form, view)? {
            Some(tensor) => tensor,
            None => self.causal_matrix(origin, rows, keys, form),
        }
    }

    /// A full causal mask for sparse mode 1, INT8, of at least `rows` rows and `keys` keys: the operator takes larger
    /// tensors and reads what it needs. So masks share one cached square, contiguous and without a copy; a mask that is
    /// much smaller than the square gets a tensor of its own. A call has several query rows a sequence: exactly `rows`,
    /// or fewer with [`CausalOrigin::LeftUp`].
    ///
    /// It takes `Sq * Skv` bytes where [`Masks::causal`] takes 4 MiB and less time: it is for comparisons.
    ///
    /// # Errors
    /// As for [`Stream::upload`](crate::Stream::upload).
    pub fn causal_full(&self, origin: CausalOrigin, rows: usize, keys: usize) -> Result<Mask> {
        let form = self.form();
        match self.causal_rows(origin, rows, keys, form, Mask::all_mask)? {
            Some(mask) => Ok(mask),
            None => self.causal_matrix(origin, rows, keys, form).map(Mask::all_mask),
        }
    }

    /// Returns `view` of the causal square from the mask's first row on; `None` if the mask is no part of the square,
    /// or the square is much larger than the mask.
    #[inline]
    fn causal_rows<T>(
        &self,
        origin: CausalOrigin,
        rows: usize,
        keys: usize,
        form: MaskForm,
        view: impl FnOnce(AnyTensor) -> T,
    ) -> Result<Option<T>> {
        let first = match origin {
            CausalOrigin::LeftUp => Some(0),
            // With fewer keys than rows the first rows see nothing, and the square has no such row.
            CausalOrigin::RightDown => keys.checked_sub(rows),
        };
        let longest = rows.max(keys);
        let shared = longest.saturating_mul(longest) <= most_shared(rows.saturating_mul(keys));
        let Some(first) = first.filter(|_| shared) else {
            return Ok(None);
        };
        let content = Content::CausalSquare;
        let least = longest as u64;
        self.get(MaskKey { content, form }, least, |square| square.skip(first).map(view))
    }
}
