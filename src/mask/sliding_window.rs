//! Windows: a query sees its own place and some keys before it.

use std::num::{NonZeroU32, NonZeroUsize};

use ascend_spec::{MaskGeometry, SparseMode};

use crate::error::Result;
use ascend_spec::Violation;

use crate::rules;
use crate::tensor::AnyTensor;

use super::form::MaskForm;
use super::masks::Masks;
use super::value::Mask;

/// How many keys a query sees, its own among them: what models call the window.
///
/// The operator's `pre_tokens` counts the keys *before* its own and is one less. Serving code that passes the window as
/// `pre_tokens` shows a key too many; for parity with it use [`Masks::band`]. A window of no keys does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlidingWindow {
    keys_including_self: NonZeroU32,
}

impl SlidingWindow {
    /// Most keys of a window.
    pub const MAX_KEYS: usize = u32::MAX as usize;

    /// A window of `keys_including_self` keys, the query's own among them.
    ///
    /// # Errors
    /// [`MASK_WINDOW`](crate::rules::MASK_WINDOW) for 0 keys or more than [`MAX_KEYS`](Self::MAX_KEYS).
    pub fn new(keys_including_self: usize) -> Result<Self, Violation> {
        let keys = u32::try_from(keys_including_self).ok();
        match keys.and_then(NonZeroU32::new) {
            Some(keys_including_self) => Ok(Self { keys_including_self }),
            None => Err(Violation::new(
                &rules::MASK_WINDOW,
                format_args!("a window of {keys_including_self} keys"),
                format_args!("1 to {}, the query's own among them", Self::MAX_KEYS),
                "leave the window out where every key is seen",
            )),
        }
    }

    /// Keys, the query's own among them.
    pub const fn keys_including_self(self) -> usize {
        self.keys_including_self.get() as usize
    }

    /// The operator's `pre_tokens`.
    pub const fn pre_tokens(self) -> i64 {
        (self.keys_including_self.get() as i64).saturating_sub(1)
    }

    fn geometry(self, rows: u64, keys: u64) -> MaskGeometry {
        let before = self.pre_tokens();
        MaskGeometry::new(SparseMode::Band, true, rows, keys, before, 0)
    }
}

impl TryFrom<NonZeroUsize> for SlidingWindow {
    type Error = Violation;

    /// Makes a window of this number of keys, as [`SlidingWindow::new`] does.
    fn try_from(keys_including_self: NonZeroUsize) -> Result<Self, Violation> {
        Self::new(keys_including_self.get())
    }
}

impl Masks<'_> {
    /// Query row `i` sees the keys from `i + Skv - Sq - pre_tokens` to `i + Skv - Sq + next_tokens`: sparse mode 4
    /// with the compressed mask and the operator's own numbers, `pre_tokens + next_tokens + 1` keys a row.
    ///
    /// # Errors
    /// As for [`Stream::upload`](crate::Stream::upload). A band without keys breaks a rule when the call is planned.
    pub fn band(&self, pre_tokens: i64, next_tokens: i64) -> Result<Mask> {
        let mask = self.mode(SparseMode::Band)?;
        Ok(mask.window(pre_tokens, next_tokens))
    }

    /// A causal window: sparse mode 4 with the compressed mask, which serves every window and length. Mistral, Gemma,
    /// gpt-oss.
    ///
    /// # Errors
    /// As for [`Stream::upload`](crate::Stream::upload).
    pub fn sliding_window(&self, window: SlidingWindow) -> Result<Mask> {
        self.band(window.pre_tokens(), 0)
    }

    /// The mask of [`Masks::sliding_window`] as a full tensor `[rows, keys]`, the last row at the last key: 2048 x
    /// 2048 in BOOL is what vLLM-Ascend once made. Sparse mode 4 takes the compressed mask, never this one.
    ///
    /// # Errors
    /// As for [`Masks::sliding_window`].
    pub fn sliding_window_matrix(
        &self,
        window: SlidingWindow,
        rows: usize,
        keys: usize,
        form: MaskForm,
    ) -> Result<AnyTensor> {
        self.matrix(window.geometry(rows as u64, keys as u64), form)
    }
}
