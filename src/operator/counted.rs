//! Numbers of callers as operators count them: INT64.

use crate::error::{Error, Result};
use crate::refusal::{CallRule, Refused};

/// A list of lengths as operators count, or the first that they cannot.
#[derive(Clone, Debug)]
pub(crate) struct Lengths(std::result::Result<Vec<i64>, Refused>);

impl Lengths {
    /// The same lengths, in the same memory.
    pub(crate) fn new(argument: &str, lengths: Vec<usize>) -> Self {
        let mut each = lengths.iter().enumerate();
        if let Some((at, len)) = each.find(|(_, len)| i64::try_from(**len).is_err()) {
            return Self(Err(Refused::new(
                CallRule::LengthsOverflow,
                format_args!("{len} at {argument}[{at}]"),
                format_args!("at most {}", i64::MAX),
                "give the lengths of a batch that exists; subtract lengths with saturation",
            )));
        }
        let counted = lengths
            .into_iter()
            .filter_map(|len| i64::try_from(len).ok());
        Self(Ok(counted.collect()))
    }

    /// A list that the caller has given, or none.
    pub(crate) fn given(lengths: &Option<Lengths>) -> Result<Option<&[i64]>> {
        match lengths {
            None => Ok(None),
            Some(Lengths(Ok(lengths))) => Ok(Some(lengths)),
            Some(Lengths(Err(refused))) => Err(refused.clone().into()),
        }
    }
}

/// A number of heads.
pub(crate) fn heads(argument: &'static str, given: Option<usize>) -> Result<Option<i64>> {
    let counted = given.map(i64::try_from).transpose();
    counted.map_err(|_| {
        Error::invalid(
            argument,
            given.unwrap_or_default(),
            format_args!("at most {}", i64::MAX),
        )
    })
}
