//! Which keys the tokens of a layer see, and the conversion to the operator's mask.

use std::num::NonZeroUsize;

use ascend_attention::mask::MaskForm;
use ascend_attention::{CausalOrigin, Mask, Masks, SlidingWindow, Violation};
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::rules;

/// Which keys a token sees.
///
/// Eager calls, calls with sinks and captured calls all get their mask from [`Causality::mask`]. A window over a
/// layer that is not causal, or a window of no keys, cannot be expressed:
///
/// ```compile_fail,E0308
/// use ascend_serving::Causality;
///
/// let window = Causality::Window(0);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Causality {
    /// Every key, also those of later tokens: encoders, some drafters.
    Bidirectional,
    /// Its own key and those before.
    #[default]
    Causal,
    /// The last keys up to its own, at most this number of them.
    Window(NonZeroUsize),
    /// Its own key and those before in its chunk: the context is divided into chunks of this number of tokens, from
    /// its first token on (chunked local attention, `attention_chunk_size` of Llama 4). For the backend
    /// [`Backend::ChunkedLocal`](crate::Backend::ChunkedLocal).
    Chunk(NonZeroUsize),
}

impl Causality {
    /// Converts the two settings that model files have.
    ///
    /// # Errors
    /// [`MASK_WINDOW`](crate::rules::MASK_WINDOW) for a window of 0 keys, and for a window in a layer that is not
    /// causal: engines disagree on which of the two wins.
    pub fn from_flags(causal: bool, window: Option<usize>) -> Result<Self, Violation> {
        match (causal, window.map(NonZeroUsize::new)) {
            (false, None) => Ok(Self::Bidirectional),
            (true, None) => Ok(Self::Causal),
            (true, Some(Some(keys))) => Ok(Self::Window(keys)),
            (_, Some(None)) => Err(Violation::new(
                &rules::MASK_WINDOW,
                "a window of 0 keys",
                "1 or more, the token's own among them; none for no window",
                "leave the window out",
            )),
            (false, Some(Some(keys))) => Err(Violation::new(
                &rules::MASK_WINDOW,
                format_args!("a window of {keys} keys in a layer that is not causal"),
                "a window or no causality, not both",
                "drop one of the two for this layer",
            )),
        }
    }

    /// The operator's mask: `sparseMode`, `attenMask`, `preTokens`, `nextTokens`.
    ///
    /// # Errors
    /// The errors of making the compressed mask, the first time on a device;
    /// [`BACKEND_CHUNK`](crate::rules::BACKEND_CHUNK) for chunks, which the operator does not support.
    pub fn mask(self, masks: &Masks<'_>) -> Result<Mask> {
        match self {
            Self::Chunk(_) => Err(self.unknown_to_operators().into()),
            Self::Bidirectional => Ok(Mask::none()),
            Self::Causal => Ok(masks.causal(CausalOrigin::RightDown)?),
            // Larger than every request.
            Self::Window(keys) if i32::try_from(keys.get()).is_err() => Self::Causal.mask(masks),
            Self::Window(keys) => Ok(masks.sliding_window(SlidingWindow::try_from(keys)?)?),
        }
    }

    /// Makes the operator's mask, as [`mask`](Self::mask) does, for a call with `rows` query rows and equally many
    /// keys that takes no `preTokens` and `nextTokens`: a window that hides keys is a tensor `[rows, rows]` of BOOL
    /// in mode 1.
    ///
    /// # Errors
    /// As for [`Causality::mask`].
    pub(crate) fn square_mask(self, masks: &Masks<'_>, rows: usize) -> Result<Mask> {
        match self {
            Self::Window(keys) if keys.get() < rows => {
                let window = SlidingWindow::try_from(keys)?;
                let hidden = masks.sliding_window_matrix(window, rows, rows, MaskForm::BOOL)?;
                Ok(Mask::all_mask(hidden))
            }
            Self::Window(_) => Self::Causal.mask(masks),
            Self::Causal | Self::Bidirectional | Self::Chunk(_) => self.mask(masks),
        }
    }

    /// The refusal on behalf of a backend that supports the operator's own masks alone.
    fn unknown_to_operators(self) -> Violation {
        Violation::new(
            &rules::BACKEND_CHUNK,
            format_args!("{self:?}"),
            "bidirectional, causal, or a window",
            "add `Backend::ChunkedLocal`",
        )
    }

    /// The first token that token number `cached` sees.
    pub(crate) fn shown_from(self, cached: usize) -> usize {
        match self {
            Self::Bidirectional | Self::Causal => 0,
            Self::Window(keys) => cached.saturating_sub(keys.get().saturating_sub(1)),
            Self::Chunk(size) => cached - cached % size,
        }
    }

    /// Replaces a window that hides no key of a request of at most `longest` keys by [`Causality::Causal`].
    pub(crate) fn over(self, longest: usize) -> Self {
        match self {
            Self::Window(keys) if keys.get() >= longest => Self::Causal,
            other => other,
        }
    }

    /// Whether every token sees no earlier keys that it would not see under `other`.
    pub(crate) fn is_within(self, other: Self) -> bool {
        match (self, other) {
            (_, Self::Bidirectional | Self::Causal) => true,
            (Self::Bidirectional | Self::Causal, _) => false,
            (Self::Window(own) | Self::Chunk(own), Self::Window(other)) => own <= other,
            (Self::Chunk(own), Self::Chunk(other)) => other.get().is_multiple_of(own.get()),
            // The first token of a chunk sees itself alone.
            (Self::Window(own), Self::Chunk(_)) => own.get() == 1,
        }
    }

    /// The number of keys that a token sees at most.
    pub fn window(self) -> Option<NonZeroUsize> {
        match self {
            Self::Window(keys) | Self::Chunk(keys) => Some(keys),
            Self::Bidirectional | Self::Causal => None,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn flags_that_contradict_each_other_are_refused() {
        let convert = Causality::from_flags;
        assert_eq!(convert(false, None).unwrap(), Causality::Bidirectional);
        assert_eq!(convert(true, None).unwrap(), Causality::Causal);
        assert_eq!(convert(true, Some(5)).unwrap().window().unwrap().get(), 5);
        for (causal, window) in [(true, 0), (false, 0), (false, 5)] {
            assert_eq!(convert(causal, Some(window)).unwrap_err().rule, &rules::MASK_WINDOW);
        }
    }

    #[test]
    fn what_is_shown_is_what_tokens_see() {
        let size = |n| NonZeroUsize::new(n).unwrap();
        let kinds: Vec<Causality> = [Causality::Causal, Causality::Bidirectional]
            .into_iter()
            .chain((1..7).flat_map(|n| [Causality::Window(size(n)), Causality::Chunk(size(n))]))
            .collect();
        let sees = |kind: Causality, token: usize, key: usize| match kind {
            Causality::Bidirectional => true,
            Causality::Causal => key <= token,
            Causality::Window(n) => key <= token && token - key < n.get(),
            Causality::Chunk(n) => key <= token && token / n.get() == key / n.get(),
        };
        let tokens = 0..40;
        for &one in &kinds {
            for token in tokens.clone() {
                let first = tokens.clone().find(|&key| sees(one, token, key));
                assert_eq!(first, Some(one.shown_from(token)), "{one:?} {token}");
                let seen = tokens.clone().filter(|&key| sees(one, token, key)).count();
                assert!(one.window().is_none_or(|most| seen <= most.get()));
            }
            for &other in &kinds {
                let within = tokens.clone().all(|token| other.shown_from(token) <= one.shown_from(token));
                assert_eq!(one.is_within(other), within, "{one:?} {other:?}");
            }
        }
    }
}
