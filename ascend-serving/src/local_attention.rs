//! Attention within fixed chunks of the context, by virtual requests, one for each chunk.
//!
//! With chunks of C tokens a query sees, causally, the keys of its own chunk alone. An operator with causal attention
//! computes it if each piece of a request within one chunk becomes a request of its own.

use std::num::NonZeroU64;

use ascend_attention::Violation;
use ascend_attention::attention::PerRequest;
use ascend_attention::spec::geometry::LocalChunks;

use crate::kv::PageTable;
use crate::rules;

/// The virtual batch of a batch with local attention.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LocalBatch {
    /// Query rows of each virtual request.
    pub q_lengths: PerRequest,
    /// Keys of each virtual request.
    pub kv_lengths: PerRequest,
    /// The real request that each virtual request belongs to.
    pub request: Vec<usize>,
    /// Position of each virtual request's first key: a multiple of the chunk.
    pub first_key: Vec<usize>,
    /// Blocks of each virtual request.
    pub table: PageTable,
}

impl LocalBatch {
    /// Divides a batch of `q_lengths` new tokens each, which have `kv_lengths` keys including their own, into chunks
    /// of `chunk`.
    ///
    /// # Errors
    /// [`CHUNK_SIZE`](crate::rules::CHUNK_SIZE) unless `chunk` is a multiple of `block_size` and neither is 0: a
    /// chunk would begin within a block. [`LENGTHS_BATCH`](crate::rules::LENGTHS_BATCH) for lists of different
    /// lengths, [`LENGTHS_KV_BELOW_Q`](crate::rules::LENGTHS_KV_BELOW_Q), [`TABLE_ROW`](crate::rules::TABLE_ROW),
    /// [`POOL_SIZE`](crate::rules::POOL_SIZE) for a block size that is no INT32.
    pub fn new(
        q_lengths: &PerRequest,
        kv_lengths: &PerRequest,
        table: &PageTable,
        block_size: usize,
        chunk: usize,
    ) -> Result<Self, Violation> {
        let size = NonZeroU64::new(chunk as u64);
        let Some(size) = size.filter(|_| chunk.is_multiple_of(block_size)) else {
            return Err(rules::CHUNK_SIZE.broken(
                format_args!("chunks of {chunk} tokens in blocks of {block_size}"),
                format_args!("1 token or more, a multiple of the {} of a block", block_size.max(1)),
            ));
        };
        let (q, kv) = (q_lengths.lengths(), kv_lengths.lengths());
        if q.len() != kv.len() || q.len() != table.requests() {
            return Err(Violation::new(
                &rules::LENGTHS_BATCH,
                format_args!("{} query lengths, {} key lengths, {} rows", q.len(), kv.len(), table.requests()),
                "as many of each",
                "make them from the same batch",
            ));
        }
        let mut local = Self::default();
        let mut rows = Vec::new();
        for (request, (&q, &kv)) in q.iter().zip(kv).enumerate() {
            if q > kv {
                return Err(rules::LENGTHS_KV_BELOW_Q.broken(
                    format_args!("{q} query rows and {kv} keys of request {request}"),
                    "at least as many keys",
                ));
            }
            let used = table.used(request, kv, block_size)?;
            let chunks = LocalChunks::new(size, q as u64, kv as u64);
            for part in chunks.virtual_sequences() {
                let (start, keys) = (part.kv_start as usize, part.kv_len as usize);
                local.q_lengths.push(part.q_len as usize)?;
                local.kv_lengths.push(keys)?;
                local.request.push(request);
                local.first_key.push(start);
                let end = start + keys;
                rows.push(&used[start / block_size..end.div_ceil(block_size)]);
            }
        }
        local.table = PageTable::from_rows(&rows)?;
        Ok(local)
    }

    /// The rows of the table.
    pub(crate) fn rows(&self) -> Vec<Vec<usize>> {
        self.table.rows().map(<[usize]>::to_vec).collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn per(lengths: &[usize]) -> PerRequest {
        PerRequest::new(lengths.to_vec()).unwrap()
    }

    fn table(kv: &[usize], page: usize) -> PageTable {
        let row = |(request, len): (usize, &usize)| -> Vec<usize> {
            let pages = len.div_ceil(page);
            (0..pages).map(|page| request * 100 + page).collect()
        };
        let rows: Vec<Vec<usize>> = (0..).zip(kv).map(row).collect();
        PageTable::from_rows(&rows).unwrap()
    }

    /// The example of SGLang's documentation: queries of 4, 10 and 5 tokens, 6, 17 and 9 keys, chunks of 4.
    #[test]
    fn three_requests_become_eight() {
        let (q, kv) = ([4, 10, 5], [6, 17, 9]);
        let local = LocalBatch::new(&per(&q), &per(&kv), &table(&kv, 2), 2, 4).unwrap();
        assert_eq!(local.q_lengths.lengths(), [2, 2, 1, 4, 4, 1, 4, 1]);
        assert_eq!(local.kv_lengths.lengths(), [4, 2, 4, 4, 4, 1, 4, 1]);
        assert_eq!(local.request, [0, 0, 1, 1, 1, 1, 2, 2]);
        assert_eq!(local.first_key, [0, 4, 4, 8, 12, 16, 4, 8]);
        assert_eq!(local.table.row(5), Some(&[108, 0][..]));
        assert_eq!(local.table.row(6), Some(&[202, 203][..]));
    }

    #[test]
    fn chunks_that_break_pages_are_refused() {
        let one = per(&[4]);
        for (page, chunk) in [(16, 8), (16, 24), (0, 4), (4, 0)] {
            let error = LocalBatch::new(&one, &one, &table(&[4], 4), page, chunk).unwrap_err();
            assert_eq!(error.rule, &rules::CHUNK_SIZE);
        }
        let two = per(&[4, 4]);
        let error = LocalBatch::new(&two, &one, &table(&[4], 4), 4, 4).unwrap_err();
        assert_eq!(error.rule, &rules::LENGTHS_BATCH);
        let error = LocalBatch::new(&per(&[5]), &one, &table(&[4], 4), 4, 4).unwrap_err();
        assert_eq!(error.rule, &rules::LENGTHS_KV_BELOW_Q);
    }

    proptest! {
        /// Each query sees, bottom-right causally in its virtual request, exactly the keys up to itself in its chunk.
        #[test]
        fn virtual_requests_see_their_chunk(
            requests in prop::collection::vec((0usize..40, 0usize..40), 1..5),
            page in 1usize..5,
            pages in 1usize..5,
        ) {
            let chunk = page * pages;
            let q: Vec<usize> = requests.iter().map(|(q, _)| *q).collect();
            let kv: Vec<usize> = requests.iter().map(|(q, cached)| q + cached).collect();
            let table = table(&kv, page);
            let local = LocalBatch::new(&per(&q), &per(&kv), &table, page, chunk).unwrap();
            let mut virtual_rows = Vec::new();
            for (v, (&rows, &keys)) in local.q_lengths.lengths().iter().zip(local.kv_lengths.lengths()).enumerate() {
                let request = local.request[v];
                for i in 0..rows {
                    let first = local.first_key[v];
                    let sees: Vec<usize> = (0..keys).filter(|j| *j + rows <= i + keys).map(|j| j + first).collect();
                    for key in &sees {
                        let position = *key - first;
                        let slot = crate::kv::slot(local.table.row(v).unwrap(), position, page);
                        prop_assert_eq!(slot, crate::kv::slot(table.row(request).unwrap(), *key, page));
                    }
                    virtual_rows.push((request, sees));
                }
            }
            let mut rows = Vec::new();
            for (request, (q, kv)) in q.iter().zip(&kv).enumerate() {
                for position in kv - q..*kv {
                    let first = position / chunk * chunk;
                    rows.push((request, (first..=position).collect::<Vec<_>>()));
                }
            }
            prop_assert_eq!(virtual_rows, rows);
        }
    }
}
