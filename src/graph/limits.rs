//! How long the requests of a captured call may become.

use crate::attention::{Cumulative, PerRequest};
use ascend_spec::Violation;

use crate::rules;

/// How many keys the requests of a captured call may have, each and together.
///
/// A packed call is refused unless the cache has at least as many blocks as the keys of all its requests take. Many
/// requests that may each become long would together take more blocks than there are, so that two limits are
/// declared: the keys of one request, and the blocks of all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KeyLimits {
    /// Most keys of a request.
    pub keys: usize,
    /// Most blocks of all requests together, at most those of the cache. A block that requests share counts for each,
    /// and a dummy request takes one.
    pub blocks: usize,
    /// Tokens in a block.
    pub block_size: usize,
}

impl KeyLimits {
    /// Number of blocks that `keys` keys take.
    fn blocks_of(&self, keys: usize) -> usize {
        keys.div_ceil(self.block_size.max(1))
    }

    /// Returns key lengths at the limits for requests of these query rows: once with one request after the other as
    /// long as the blocks that are left allow, and once with all requests equally long.
    ///
    /// # Errors
    /// [`GRAPH_LENGTHS`](crate::rules::GRAPH_LENGTHS) for limits that have no room for the rows.
    pub fn extremes(&self, rows: &Cumulative) -> Result<Vec<PerRequest>, Violation> {
        let rows = rows.per_request();
        // Lengths that the operator counts.
        let most = self.keys.min(PerRequest::MAX_LENGTH);
        let (blocks, size) = (self.blocks, self.block_size.max(1));
        let least: Vec<usize> = rows.lengths().iter().map(|rows| (*rows).max(1)).collect();
        let taken = least.iter().fold(0usize, |sum, keys| sum.saturating_add(self.blocks_of(*keys)));
        let longest = least.iter().copied().max().unwrap_or(0);
        if taken > blocks || longest > most {
            return Err(Violation::new(
                &rules::GRAPH_LENGTHS,
                format_args!(
                    "{} requests of up to {longest} rows, which take {taken} blocks of {} tokens at least",
                    least.len(),
                    self.block_size
                ),
                format_args!("{blocks} blocks in all, {most} keys a request"),
                "capture a smaller size, or declare more blocks and keys",
            ));
        }
        let mut left = blocks - taken;
        let uneven = least.iter().map(|least| {
            let own = self.blocks_of(*least);
            let room = own.saturating_add(left).saturating_mul(size);
            let keys = most.min(room).max(*least);
            left -= self.blocks_of(keys) - own;
            keys
        });
        let mut extremes = vec![PerRequest::new(uneven.collect())?];
        let each = blocks / least.len().max(1);
        let even = most.min(each.saturating_mul(size));
        if least.iter().all(|least| *least <= even) {
            extremes.push(PerRequest::new(vec![even; least.len()])?);
        }
        Ok(extremes)
    }

    /// Refuses requests that are beyond the limits; `keys` has the number of keys of each.
    ///
    /// # Errors
    /// [`GRAPH_LENGTHS`](crate::rules::GRAPH_LENGTHS).
    pub fn admits(&self, keys: &[usize]) -> Result<(), Violation> {
        let most = self.keys;
        if let Some(request) = keys.iter().position(|keys| *keys > most) {
            return Err(Violation::new(
                &rules::GRAPH_LENGTHS,
                format_args!("{} keys of request {request}", keys.get(request).copied().unwrap_or(0)),
                format_args!("at most {most}"),
                "compute the step without a graph, or declare more keys a request at the capture",
            ));
        }
        let taken = keys.iter().fold(0usize, |sum, keys| sum.saturating_add(self.blocks_of(*keys)));
        if taken > self.blocks {
            return Err(Violation::new(
                &rules::GRAPH_LENGTHS,
                format_args!("{taken} blocks of {} requests, blocks that they share counted for each", keys.len()),
                format_args!("at most {}", self.blocks),
                "preempt a request, or declare more blocks at the capture, at most those of the cache",
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn extremes_are_within_the_limits_and_reach_them() {
        let limits = KeyLimits { keys: 1000, blocks: 20, block_size: 128 };
        let rows = Cumulative::new((1..=6).collect()).unwrap();
        let extremes = limits.extremes(&rows).unwrap();
        // Two requests take 8 blocks each, the others one, which they fill.
        let lengths: Vec<_> = extremes.iter().map(PerRequest::lengths).collect();
        assert_eq!(lengths, [[1000, 1000, 128, 128, 128, 128], [384; 6]]);
        for lengths in lengths {
            limits.admits(lengths).unwrap();
        }
        let error = limits.admits(&[1000, 1000, 1, 1, 1, 129]).unwrap_err();
        assert!(error.given.starts_with("21 blocks of 6 requests"), "{error}");
        assert_eq!(limits.admits(&[1001]).unwrap_err().rule, &rules::GRAPH_LENGTHS);
        let many = Cumulative::new((1..=21).collect()).unwrap();
        assert_eq!(limits.extremes(&many).unwrap_err().rule, &rules::GRAPH_LENGTHS);
        let wide = KeyLimits { keys: usize::MAX, blocks: usize::MAX, block_size: usize::MAX };
        let extremes = wide.extremes(&rows).unwrap();
        assert!(extremes.iter().all(|e| wide.admits(e.lengths()).is_ok()));
        let none = KeyLimits { block_size: 0, ..limits };
        assert!(none.extremes(&rows).is_ok());
    }
}
