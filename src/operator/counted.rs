//! Numbers of callers as the operators' INT64.

use crate::error::{Error, Result};
use ascend_spec::Violation;

use crate::rules;

/// A list of lengths as INT64, or the refusal of the first that INT64 cannot hold.
#[derive(Clone, Debug)]
pub(crate) struct Lengths(std::result::Result<Vec<i64>, Violation>);

impl Lengths {
    /// Converts the lengths to INT64, in the same memory.
    pub(crate) fn new(argument: &str, lengths: Vec<usize>) -> Self {
        let mut each = lengths.iter().enumerate();
        if let Some((at, len)) = each.find(|(_, len)| i64::try_from(**len).is_err()) {
            return Self(Err(Violation::new(
                &rules::LENGTHS_OVERFLOW,
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

    /// Returns the lengths that the caller has set, if any; an error if one of them was refused.
    pub(crate) fn given(lengths: &Option<Lengths>) -> Result<Option<&[i64]>> {
        match lengths {
            None => Ok(None),
            Some(Lengths(Ok(lengths))) => Ok(Some(lengths)),
            Some(Lengths(Err(refused))) => Err(refused.clone().into()),
        }
    }
}

/// Converts a number of heads to INT64.
pub(crate) fn heads(argument: &'static str, given: Option<usize>) -> Result<Option<i64>> {
    let counted = given.map(i64::try_from).transpose();
    counted.map_err(|_| {
        Error::invalid(
            argument,
            given.unwrap_or_default(),
            format_args!("at most {}", i64::MAX),
        )
        .fix("divide the call")
    })
}
