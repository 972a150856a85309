//! The sizes of a sample.

use crate::error::{Error, Result};

/// Refuses sizes of 0, and query heads that do not share the others evenly.
pub(crate) fn check_sizes(
    sizes: &[(&'static str, usize)],
    heads: usize,
    kv_heads: usize,
) -> Result<()> {
    for &(name, given) in sizes {
        if given == 0 {
            return Err(Error::invalid(name, given, "at least 1").fix("leave empty samples out"));
        }
    }
    if heads.checked_rem(kv_heads) != Some(0) {
        let allowed = format_args!("a multiple of kv_heads, {kv_heads}");
        return Err(Error::invalid("heads", heads, allowed).fix("give the heads of the model"));
    }
    Ok(())
}
