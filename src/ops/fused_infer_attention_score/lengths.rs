//! Lengths of a batch, in the two forms that operators take, which cannot be mixed up.

use serde::{Deserialize, Serialize};

use ascend_spec::Violation;

use crate::rules;

use super::builder::FusedInferAttention;

/// Where each request's tokens end among the packed ones: `[3, 7, 8]` for lengths of 3, 4 and 1. None is above
/// [`PerRequest::MAX_LENGTH`].
///
/// Without a leading 0, as CANN's packed layouts take it; [`Cumulative::with_zero`] is the form of `cu_seqlens` and
/// `query_start_loc`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<usize>")]
pub struct Cumulative(Vec<usize>);

/// The length of each request: `[3, 4, 1]`. None is above [`PerRequest::MAX_LENGTH`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<usize>")]
pub struct PerRequest(Vec<usize>);

impl TryFrom<Vec<usize>> for Cumulative {
    type Error = Violation;

    fn try_from(ends: Vec<usize>) -> Result<Self, Violation> {
        Self::new(ends)
    }
}

impl TryFrom<Vec<usize>> for PerRequest {
    type Error = Violation;

    fn try_from(lengths: Vec<usize>) -> Result<Self, Violation> {
        Self::new(lengths)
    }
}

/// Converts to what [`FusedInferAttention::actual_seq_lengths_kv`](super::FusedInferAttention::actual_seq_lengths_kv)
/// takes.
impl From<PerRequest> for Vec<usize> {
    fn from(lengths: PerRequest) -> Self {
        lengths.0
    }
}

/// Copies into what [`FusedInferAttention::actual_seq_lengths_kv`](super::FusedInferAttention::actual_seq_lengths_kv)
/// takes.
impl From<&PerRequest> for Vec<usize> {
    fn from(lengths: &PerRequest) -> Self {
        lengths.0.clone()
    }
}

impl From<Cumulative> for Vec<usize> {
    fn from(ends: Cumulative) -> Self {
        ends.0
    }
}

impl From<&Cumulative> for Vec<usize> {
    fn from(ends: &Cumulative) -> Self {
        ends.0.clone()
    }
}

/// Refuses a length or an end that the operator's integers do not hold.
#[inline]
fn countable(request: usize, tokens: usize) -> Result<(), Violation> {
    match tokens <= PerRequest::MAX_LENGTH {
        true => Ok(()),
        false => Err(uncountable(request, tokens)),
    }
}

#[cold]
fn uncountable(request: usize, tokens: usize) -> Violation {
    Violation::new(
        &rules::LENGTHS_OVERFLOW,
        format_args!("{tokens} tokens at request {request}"),
        format_args!("at most {}", PerRequest::MAX_LENGTH),
        "give the lengths of a batch that exists; subtract lengths with saturation",
    )
}

/// Refuses an end that is below the previous one.
#[inline]
fn check_end(before: usize, request: usize, end: usize) -> Result<(), Violation> {
    match end >= before {
        true => Ok(()),
        false => Err(decreasing_end(before, request, end)),
    }
}

#[cold]
fn decreasing_end(before: usize, request: usize, end: usize) -> Violation {
    Violation::new(
        &rules::LENGTHS_ENDS,
        format_args!("end {end} of request {request} after {before}"),
        format_args!("{before} or more"),
        "give cumulative sums; lengths of single requests are `PerRequest`",
    )
}

impl Cumulative {
    /// Ends of requests.
    ///
    /// # Errors
    /// [`LENGTHS_ENDS`](crate::rules::LENGTHS_ENDS) if they decrease,
    /// [`LENGTHS_OVERFLOW`](crate::rules::LENGTHS_OVERFLOW) beyond [`PerRequest::MAX_LENGTH`].
    pub fn new(ends: Vec<usize>) -> Result<Self, Violation> {
        let mut before = 0;
        for (request, &end) in ends.iter().enumerate() {
            check_end(before, request, end)?;
            before = end;
        }
        // The last end is the largest.
        countable(ends.len().saturating_sub(1), before)?;
        Ok(Self(ends))
    }

    /// Converts from the form with a leading 0 (`cu_seqlens`, `qo_indptr`).
    ///
    /// # Errors
    /// [`LENGTHS_ENDS`](crate::rules::LENGTHS_ENDS) if the first entry is not 0, or the others are no ends.
    pub fn from_with_zero(starts: &[usize]) -> Result<Self, Violation> {
        match starts {
            [0, ends @ ..] => Self::new(ends.to_vec()),
            _ => Err(Violation::new(
                &rules::LENGTHS_ENDS,
                format_args!("first entry {:?}", starts.first()),
                "0",
                "ends without a leading 0 are made by `Cumulative::new`",
            )),
        }
    }

    /// Returns the ends with a leading 0.
    pub fn with_zero(&self) -> Vec<usize> {
        std::iter::once(0).chain(self.0.iter().copied()).collect()
    }

    /// The length of each request.
    pub fn per_request(&self) -> PerRequest {
        let before = std::iter::once(&0).chain(&self.0);
        let lengths = self.0.iter().zip(before).map(|(end, start)| end.saturating_sub(*start));
        PerRequest(lengths.collect())
    }

    /// Number of packed tokens.
    #[inline]
    pub fn total(&self) -> usize {
        self.0.last().copied().unwrap_or(0)
    }

    /// Splits off the first `requests` requests; the others are counted from their own first token.
    pub fn split_at(&self, requests: usize) -> (Self, Self) {
        let (first, rest) = self.0.split_at(requests.min(self.0.len()));
        let start = first.last().copied().unwrap_or(0);
        let rest = rest.iter().map(|end| end.saturating_sub(start)).collect();
        (Self(first.to_vec()), Self(rest))
    }

    /// The ends.
    pub fn ends(&self) -> &[usize] {
        &self.0
    }

    /// Returns for each request its new tokens, which are its length here, and those that were cached before: the
    /// rest of its `keys`.
    pub fn new_and_cached(&self, keys: &PerRequest) -> impl Iterator<Item = (usize, usize)> {
        let new = self.per_request().0.into_iter();
        new.zip(keys.lengths()).map(|(new, keys)| (new, keys.saturating_sub(new)))
    }

    /// Adds a request whose tokens end at `end`.
    ///
    /// # Errors
    /// As for [`Cumulative::new`]; nothing is added then.
    #[inline]
    pub fn push_end(&mut self, end: usize) -> Result<(), Violation> {
        let request = self.0.len();
        check_end(self.total(), request, end)?;
        countable(request, end)?;
        self.0.push(end);
        Ok(())
    }

    /// Removes all requests, and keeps the memory for others.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}

impl PerRequest {
    /// The longest length that the operator counts: an INT64.
    pub const MAX_LENGTH: usize = i64::MAX as usize;

    /// Lengths of requests.
    ///
    /// # Errors
    /// [`LENGTHS_OVERFLOW`](crate::rules::LENGTHS_OVERFLOW) beyond [`MAX_LENGTH`](Self::MAX_LENGTH).
    pub fn new(lengths: Vec<usize>) -> Result<Self, Violation> {
        for (request, len) in lengths.iter().enumerate() {
            countable(request, *len)?;
        }
        Ok(Self(lengths))
    }

    /// Where each request's tokens end when they are packed.
    ///
    /// # Errors
    /// [`LENGTHS_OVERFLOW`](crate::rules::LENGTHS_OVERFLOW).
    pub fn cumulative(&self) -> Result<Cumulative, Violation> {
        let mut sum = 0usize;
        let mut ends = Vec::with_capacity(self.0.len());
        for (request, len) in self.0.iter().enumerate() {
            sum = sum.saturating_add(*len);
            countable(request, sum)?;
            ends.push(sum);
        }
        Ok(Cumulative(ends))
    }

    /// Splits off the first `requests` requests.
    pub fn split_at(&self, requests: usize) -> (Self, Self) {
        let (first, rest) = self.0.split_at(requests.min(self.0.len()));
        (Self(first.to_vec()), Self(rest.to_vec()))
    }

    /// The lengths.
    pub fn lengths(&self) -> &[usize] {
        &self.0
    }

    /// Adds a request of this length.
    ///
    /// # Errors
    /// [`LENGTHS_OVERFLOW`](crate::rules::LENGTHS_OVERFLOW) beyond [`MAX_LENGTH`](Self::MAX_LENGTH); nothing is
    /// added then.
    #[inline]
    pub fn push(&mut self, len: usize) -> Result<(), Violation> {
        countable(self.0.len(), len)?;
        self.0.push(len);
        Ok(())
    }

    /// Removes all requests, and keeps the memory for others.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}

/// Query and key lengths of a call, in the form that the query's layout and the keys' place need.
///
/// The operator takes bare integers for all of them and computes something else if they come in the other form; here
/// the forms are types, and the wrong one does not compile:
///
/// ```
/// use ascend_attention::attention::{CallLengths, PerRequest};
///
/// let lengths = PerRequest::new(vec![3, 4])?;
/// let ends = lengths.cumulative()?;
/// let paged = CallLengths::PackedPaged { q: &ends, kv: &lengths };
/// assert_eq!(paged.actual_seq_lengths(), Some(&[3, 7][..]));
/// assert_eq!(paged.actual_seq_lengths_kv(), [3, 4]);
/// # Ok::<(), ascend_attention::Violation>(())
/// ```
///
/// ```compile_fail,E0308
/// # use ascend_attention::attention::{CallLengths, PerRequest};
/// # let lengths = PerRequest::new(vec![3, 4])?;
/// let ends = lengths.cumulative()?;
/// let paged = CallLengths::PackedPaged { q: &ends, kv: &ends }; // keys of a paged call are counted per request
/// # Ok::<(), ascend_attention::Violation>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CallLengths<'a> {
    /// TND over a paged cache.
    PackedPaged {
        /// Ends of the query rows.
        q: &'a Cumulative,
        /// Keys of each request.
        kv: &'a PerRequest,
    },
    /// TND over packed keys.
    PackedDense {
        /// Ends of the query rows.
        q: &'a Cumulative,
        /// Ends of the keys.
        kv: &'a Cumulative,
    },
    /// Layouts with a batch axis.
    Batched {
        /// Query rows of each request; none where all rows are valid, and with a single one.
        q: Option<&'a PerRequest>,
        /// Keys of each request.
        kv: &'a PerRequest,
    },
}

impl CallLengths<'_> {
    /// CANN's `actualSeqLengths`, which [`CallLengths::apply`] gives to a call.
    pub fn actual_seq_lengths(&self) -> Option<&[usize]> {
        match self {
            Self::PackedPaged { q, .. } | Self::PackedDense { q, .. } => Some(q.ends()),
            Self::Batched { q, .. } => q.map(PerRequest::lengths),
        }
    }

    /// CANN's `actualSeqLengthsKv`.
    pub fn actual_seq_lengths_kv(&self) -> &[usize] {
        match self {
            Self::PackedDense { kv, .. } => kv.ends(),
            Self::PackedPaged { kv, .. } | Self::Batched { kv, .. } => kv.lengths(),
        }
    }

    /// Keys of each request, in whatever form the operator takes them.
    pub fn keys(&self) -> PerRequest {
        match self {
            Self::PackedDense { kv, .. } => kv.per_request(),
            Self::PackedPaged { kv, .. } | Self::Batched { kv, .. } => (*kv).clone(),
        }
    }

    /// Describes the form, for refusals.
    pub(crate) fn form(&self) -> &'static str {
        match self {
            Self::PackedPaged { .. } => "packed over a paged cache",
            Self::PackedDense { .. } => "packed over packed keys",
            Self::Batched { .. } => "with a batch axis",
        }
    }

    /// Sets both lists of a call.
    pub fn apply(&self, call: FusedInferAttention) -> FusedInferAttention {
        let call = call.actual_seq_lengths_kv(self.actual_seq_lengths_kv());
        match self.actual_seq_lengths() {
            Some(lengths) => call.actual_seq_lengths(lengths),
            None => call,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn wrong_forms_are_named() {
        let rule = |ends: &[usize]| Cumulative::new(ends.to_vec()).unwrap_err().rule;
        assert_eq!(rule(&[3, 2]), &rules::LENGTHS_ENDS);
        assert_eq!(rule(&[usize::MAX]), &rules::LENGTHS_OVERFLOW);
        let leading = Cumulative::from_with_zero(&[3, 7]).unwrap_err();
        assert_eq!(leading.rule, &rules::LENGTHS_ENDS);
        assert!(Cumulative::from_with_zero(&[]).is_err());
        let long = PerRequest::new(vec![4, PerRequest::MAX_LENGTH + 1]).unwrap_err();
        assert_eq!(long.rule, &rules::LENGTHS_OVERFLOW);
        assert_eq!(long.given, "9223372036854775808 tokens at request 1");
        let many = PerRequest::new(vec![PerRequest::MAX_LENGTH, 1]).unwrap();
        assert_eq!(many.cumulative().unwrap_err().rule, &rules::LENGTHS_OVERFLOW);
    }

    #[test]
    fn requests_are_added_only_if_they_count() {
        let mut ends = Cumulative::default();
        ends.push_end(3).unwrap();
        let before = ends.push_end(2).unwrap_err();
        assert_eq!(before.rule, &rules::LENGTHS_ENDS);
        assert_eq!(before.given, "end 2 of request 1 after 3");
        let rule = ends.push_end(usize::MAX).unwrap_err().rule;
        assert_eq!(rule, &rules::LENGTHS_OVERFLOW);
        assert_eq!(ends.ends(), [3]);
        let mut lengths = PerRequest::default();
        lengths.push(PerRequest::MAX_LENGTH).unwrap();
        let long = lengths.push(PerRequest::MAX_LENGTH + 1).unwrap_err();
        assert_eq!(long.rule, &rules::LENGTHS_OVERFLOW);
        assert_eq!(lengths.lengths(), [PerRequest::MAX_LENGTH]);
        lengths.clear();
        assert!(lengths.lengths().is_empty());
    }

    #[test]
    fn the_place_of_the_keys_decides_the_form() {
        let per = PerRequest::new(vec![3, 4]).unwrap();
        let ends = per.cumulative().unwrap();
        let forms = |lengths: CallLengths<'_>| {
            let q = lengths.actual_seq_lengths().map(<[usize]>::to_vec);
            (q, lengths.actual_seq_lengths_kv().to_vec())
        };
        let (q, kv) = (&ends, &per);
        assert_eq!(forms(CallLengths::PackedPaged { q, kv }), (Some(vec![3, 7]), vec![3, 4]));
        let kv = &ends;
        assert_eq!(forms(CallLengths::PackedDense { q, kv }), (Some(vec![3, 7]), vec![3, 7]));
        let (q, kv) = (None, &per);
        assert_eq!(forms(CallLengths::Batched { q, kv }), (None, vec![3, 4]));
    }

    proptest! {
        #[test]
        fn forms_convert_both_ways(lengths in prop::collection::vec(0usize..1000, 0..20)) {
            let per = PerRequest::new(lengths).unwrap();
            let ends = per.cumulative().unwrap();
            prop_assert_eq!(&ends.per_request(), &per);
            prop_assert_eq!(&Cumulative::from_with_zero(&ends.with_zero()).unwrap(), &ends);
            prop_assert_eq!(ends.total(), per.lengths().iter().sum::<usize>());
            let json = serde_json::to_string(&ends).unwrap();
            prop_assert_eq!(serde_json::from_str::<Cumulative>(&json).unwrap(), ends);
        }
    }
}
