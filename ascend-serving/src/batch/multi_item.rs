//! Multi-item scoring: a prompt of a prefix and several items that do not see each other.

use std::ops::Range;

use ascend_attention::Violation;

use crate::rules;

use super::layer_mask::NamedMask;

/// A prompt whose items are scored separately, in one pass over their shared prefix: a query and its documents, a
/// question and its answers. Tokens of an item see the prefix and the tokens before them in their own item.
///
/// [`MultiItemPrompt::mask`] makes the mask of a step, for the backend
/// [`Backend::NamedMask`](crate::Backend::NamedMask), and [`MultiItemPrompt::positions`] returns the positions at which
/// tokens are embedded: each item as if it followed the prefix directly. The result for an item is that of a request of
/// the prefix and that item alone.
///
/// ```
/// use ascend_serving::MultiItemPrompt;
///
/// // Three tokens of a query, and two documents that begin with the delimiter 9.
/// let prompt = MultiItemPrompt::by_delimiter(&[1, 2, 3, 9, 5, 9, 6, 7], &9);
/// assert_eq!(prompt.prefix(), 3);
/// assert_eq!(prompt.items().collect::<Vec<_>>(), [3..5, 5..8]);
/// assert!(prompt.positions().eq([0, 1, 2, 3, 4, 3, 4, 5]));
/// assert!(prompt.sees(7, 2) && prompt.sees(7, 5) && !prompt.sees(7, 4));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MultiItemPrompt {
    /// First token of each item, ascending.
    starts: Vec<usize>,
    tokens: usize,
}

impl MultiItemPrompt {
    /// A prompt of `tokens` tokens, whose items begin at these places; the tokens before the first item are the
    /// prefix. Without items it is causal.
    ///
    /// # Errors
    /// [`ITEM_STARTS`](crate::rules::ITEM_STARTS) for places that do not rise, or are past the end of the prompt.
    pub fn new(starts: impl Into<Vec<usize>>, tokens: usize) -> Result<Self, Violation> {
        let starts = starts.into();
        let falls = starts.windows(2).find(|pair| pair.first() >= pair.get(1));
        let behind = starts.last().filter(|last| **last >= tokens);
        let given = match (falls, behind) {
            (Some(pair), _) => format!("items that begin at {pair:?}"),
            (None, Some(last)) => format!("an item that begins at {last} of {tokens} tokens"),
            (None, None) => return Ok(Self { starts, tokens }),
        };
        Err(rules::ITEM_STARTS.broken(given, "places that rise and are within the prompt: an item has a token"))
    }

    /// Makes a prompt from its tokens: each delimiter begins an item. Without delimiters the prompt is all prefix.
    pub fn by_delimiter<T: PartialEq>(tokens: &[T], delimiter: &T) -> Self {
        let places = tokens.iter().enumerate();
        let starts = places.filter_map(|(place, token)| (token == delimiter).then_some(place));
        // Indices of tokens rise, and are within the prompt.
        Self { starts: starts.collect(), tokens: tokens.len() }
    }

    /// Tokens of the whole prompt.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Tokens that all items see.
    pub fn prefix(&self) -> usize {
        self.starts.first().copied().unwrap_or(self.tokens)
    }

    /// The tokens of each item.
    pub fn items(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let ends = self.starts.iter().skip(1).copied().chain([self.tokens]);
        self.starts.iter().zip(ends).map(|(start, end)| *start..end)
    }

    /// First token of the item that a token is in; `None` in the prefix.
    fn start_of(&self, token: usize) -> Option<usize> {
        let behind = self.starts.partition_point(|start| *start <= token);
        self.starts.get(behind.checked_sub(1)?).copied()
    }

    /// The position of each token, for its rotary embedding.
    pub fn positions(&self) -> impl Iterator<Item = usize> + '_ {
        let prefix = self.prefix();
        (0..self.tokens).map(move |token| match self.start_of(token) {
            None => token,
            Some(start) => token - start + prefix,
        })
    }

    /// Whether a token sees another one. Tokens after the prompt, which decoding would add, count as part of the last
    /// item.
    pub fn sees(&self, token: usize, key: usize) -> bool {
        key <= token && self.start_of(key).is_none_or(|start| self.start_of(token) == Some(start))
    }

    /// The mask of a step whose requests are these prompts, in order; further requests are causal. Prompts in
    /// another order need another mask.
    pub fn mask(prompts: impl Into<Vec<Self>>) -> NamedMask {
        let prompts = prompts.into();
        NamedMask::new("multi-item scoring", move |request, token, key| {
            let prompt = prompts.get(request);
            prompt.map_or(key <= token, |prompt| prompt.sees(token, key))
        })
    }
}
