//! A size of one axis in a message, where one stands for all.

use std::fmt;

/// `1 or 4`, and `1` where that is all.
pub(crate) struct OneOr(pub(crate) i64);

impl fmt::Display for OneOr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            1 => f.write_str("1"),
            size => write!(f, "1 or {size}"),
        }
    }
}
