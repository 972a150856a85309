//! Dummy requests, which fill a step up to a size.

use ascend_attention::Violation;
use ascend_attention::attention::{Cumulative, PerRequest};

use crate::rules;

use super::BatchSettings;
use super::metadata::AttentionMetadata;
use super::state::{AttentionState, StatePolicy};

impl AttentionMetadata {
    /// Adds dummy requests until there are `tokens` query tokens, as graphs captured for a size and uneven ranks
    /// need.
    ///
    /// Operators require that the last end is the number of query rows, that a verifying request has at most 16 rows,
    /// and that there are at least as many keys as rows. So the padding is divided over several dummy requests: each
    /// as long as the real ones where those are all equally long, otherwise of 16 tokens, and never of more than 16 or
    /// than a block. A dummy has as many
    /// keys as tokens, its row of the table is 0, and its tokens get the slots of the
    /// [`PadPolicy`](crate::kv::PadPolicy).
    ///
    /// # Errors
    /// [`PAD_TARGET`](crate::rules::PAD_TARGET) for fewer tokens than there are, or more than
    /// [`MAX_TOKENS`](Self::MAX_TOKENS); [`INDEX_SHAPE`](crate::rules::INDEX_SHAPE) for dummies whose rows of the
    /// table do not fit in the host's memory. Nothing is added then.
    pub fn pad_to(&mut self, tokens: usize) -> Result<(), Violation> {
        let now = self.tokens();
        if tokens < now || tokens > Self::MAX_TOKENS {
            return Err(rules::PAD_TARGET.broken(tokens, format_args!("{now} to {}", Self::MAX_TOKENS)));
        }
        let (rows, left) = (self.dummy_rows(), tokens - now);
        let dummies = (0..left).step_by(rows);
        self.add_dummies(tokens, dummies.map(|from| rows.min(left - from)))?;
        self.others.iter_mut().try_for_each(|other| other.pad_to(tokens))
    }

    /// Adds dummy requests of these query tokens each, up to `tokens` of all requests.
    fn add_dummies(&mut self, tokens: usize, dummies: impl Iterator<Item = usize> + Clone) -> Result<(), Violation> {
        let now = self.tokens();
        let (pad, block_size) = (self.settings.pad, self.settings.block_size);
        let padding = now - self.actual_tokens..tokens - self.actual_tokens;
        for nth in padding.clone() {
            // All slots are checked before anything is added.
            pad.slot_of(nth, block_size)?;
        }
        // A dummy request has block 0 for each of its keys.
        let longest = dummies.clone().fold(0, usize::max);
        self.table.widen(self.columns(longest))?;
        self.table.room(dummies.clone().count())?;
        let mut end = now;
        for dummy in dummies {
            end += dummy;
            self.q_ends.push_end(end)?;
            self.kv_lengths.push(dummy)?;
            self.table.push_cut(&[]);
        }
        for nth in padding {
            self.slots.push(pad.slot_of(nth, block_size)?);
        }
        Ok(())
    }

    /// Adds dummy requests until there are `requests` requests and `tokens` query tokens, which graphs captured for
    /// both need. The missing tokens are divided over them as evenly as possible; otherwise they are like the dummies
    /// of [`AttentionMetadata::pad_to`].
    ///
    /// # Errors
    /// [`PAD_TARGET`](crate::rules::PAD_TARGET) for fewer requests or tokens than there are, for more than
    /// [`MAX_TOKENS`](Self::MAX_TOKENS), and for a number of tokens that cannot be divided over the missing requests
    /// with at least one for each; [`INDEX_SHAPE`](crate::rules::INDEX_SHAPE) for dummies whose rows of the table do
    /// not fit in the host's memory. Nothing is added then.
    pub(crate) fn pad_to_requests(&mut self, requests: usize, tokens: usize) -> Result<(), Violation> {
        let dummies = self.missing(requests, tokens)?;
        self.add_dummies(tokens, dummies)?;
        self.others.iter_mut().try_for_each(|other| other.pad_to_requests(requests, tokens))
    }

    /// A padded copy of a step for graphs, which read the cache whatever the kind of the step is: steps of single
    /// tokens decode.
    pub(crate) fn replayed(&self, requests: usize, tokens: usize) -> Result<Self, Violation> {
        let mut copy = self.clone();
        copy.pad_to_requests(requests, tokens)?;
        copy.read_cache();
        Ok(copy)
    }

    /// A step for graphs of nothing but dummy requests, with these ends of their query tokens and numbers of keys.
    pub(crate) fn of_dummies(
        settings: BatchSettings,
        q_ends: Cumulative,
        kv_lengths: PerRequest,
    ) -> Result<Self, Violation> {
        let mut step = Self::empty(settings);
        let longest = kv_lengths.lengths().iter().copied().max().unwrap_or(0);
        let requests = kv_lengths.lengths().len();
        step.table.reset(step.columns(longest));
        step.table.room(requests)?;
        for _ in 0..requests {
            step.table.push_cut(&[]);
        }
        for nth in 0..q_ends.total() {
            step.slots.push(settings.pad.slot_of(nth, settings.block_size)?);
        }
        (step.q_ends, step.kv_lengths) = (q_ends, kv_lengths);
        step.read_cache();
        Ok(step)
    }

    /// The step as one of another kind.
    pub(crate) fn of_kind(mut self, state: AttentionState) -> Self {
        self.state = state;
        self
    }

    /// Makes the step one that reads its keys from the cache.
    pub(crate) fn read_cache(&mut self) {
        if self.is_single() {
            self.state = AttentionState::DecodeOnly;
        } else if !self.state.reads_cache() {
            self.state = AttentionState::ChunkedPrefill;
        }
        self.others.iter_mut().for_each(Self::read_cache);
    }

    /// Whether [`pad_to_requests`](Self::pad_to_requests) accepts these numbers.
    pub(crate) fn can_be_padded(&self, requests: usize, tokens: usize) -> bool {
        self.left_to(requests, tokens).is_some()
    }

    /// The numbers of requests and tokens to add; `None` if a request would have no token or a token no request.
    fn left_to(&self, requests: usize, tokens: usize) -> Option<(usize, usize)> {
        let added = requests.checked_sub(self.table.requests())?;
        let left = tokens.checked_sub(self.tokens())?;
        let fits = left >= added && (added > 0 || left == 0) && tokens <= Self::MAX_TOKENS;
        fits.then_some((added, left))
    }

    /// The query tokens of each dummy request that [`pad_to_requests`](Self::pad_to_requests) adds.
    pub(crate) fn missing(
        &self,
        requests: usize,
        tokens: usize,
    ) -> Result<impl Iterator<Item = usize> + Clone + use<>, Violation> {
        let Some((added, left)) = self.left_to(requests, tokens) else {
            let allowed = format_args!(
                "{} requests of {} tokens, or more of both, up to {} tokens and with one at least for each request \
                 that is added",
                self.table.requests(),
                self.tokens(),
                Self::MAX_TOKENS
            );
            let given = format_args!("{tokens} tokens of {requests} requests");
            return Err(rules::PAD_TARGET.broken(given, allowed));
        };
        Ok((0..added).map(move |nth| left / added + usize::from(nth < left % added)))
    }

    /// Query tokens of a dummy request.
    fn dummy_rows(&self) -> usize {
        let most = StatePolicy::MAX_VERIFIED.min(self.settings.block_size);
        if self.requests == 0 {
            return most;
        }
        let each = self.actual_tokens / self.requests;
        let mut ends = self.q_ends.ends().iter().take(self.requests).zip(1..);
        match ends.all(|(end, request)| *end == request * each) {
            true => each.min(most),
            false => most,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::super::BatchSettings;
    use super::super::example::{request, settings};
    use super::*;
    use crate::kv::PadPolicy;

    #[test]
    fn padding_adds_dummy_requests() {
        let requests = [request(5, 1, &[3, 9]), request(2, 4, &[7, 1])];
        let mut metadata = AttentionMetadata::new(&requests, settings()).unwrap();
        metadata.pad_to(12).unwrap();
        assert_eq!(metadata.q_ends().ends(), [1, 5, 9, 12]);
        assert_eq!(metadata.kv_lengths().lengths(), [6, 6, 4, 3]);
        assert_eq!(metadata.slots()[5..], [-1; 7]);
        assert_eq!(metadata.table().row(3), Some(&[0, 0][..]));
        assert_eq!((metadata.tokens(), metadata.actual_tokens()), (12, 5));
        assert_eq!(metadata.pad_to(11).unwrap_err().rule, &rules::PAD_TARGET);
        assert_eq!(metadata.pad_to(usize::MAX).unwrap_err().rule, &rules::PAD_TARGET);
        // Decoding pads by single tokens.
        let requests = [request(5, 1, &[3, 9]), request(2, 1, &[7])];
        let mut metadata = AttentionMetadata::new(&requests, settings()).unwrap();
        metadata.pad_to(4).unwrap();
        assert_eq!(metadata.q_ends().ends(), [1, 2, 3, 4]);
        assert_eq!(metadata.kv_lengths().lengths(), [6, 3, 1, 1]);
    }

    #[test]
    fn dummies_longer_than_a_block_have_one_for_all_of_their_keys() {
        let one = settings().block_size;
        let mut metadata = AttentionMetadata::new(&[request(0, 1, &[3])], settings()).unwrap();
        metadata.pad_to_requests(2, 2 * one + 2).unwrap();
        assert_eq!(metadata.kv_lengths().lengths(), [1, 2 * one + 1]);
        assert_eq!(metadata.table().row(0), Some(&[3, 0, 0][..]));
        assert_eq!(metadata.table().row(1), Some(&[0, 0, 0][..]));
        let renewed = metadata.renew(&[request(0, 1, &[3])]);
        assert_eq!((renewed, metadata.table().columns()), (Ok(()), 1));
    }

    #[test]
    fn padding_names_each_dump_slot_once_while_there_are_enough() {
        let dump = BatchSettings { pad: PadPolicy::DumpSlot(2), ..settings() };
        let mut metadata = AttentionMetadata::new(&[request(5, 1, &[3, 9])], dump).unwrap();
        metadata.pad_to(3).unwrap();
        metadata.pad_to(6).unwrap();
        assert_eq!(metadata.slots(), [37, 2, 3, 0, 1, 2]);
    }
}
