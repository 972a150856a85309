//! The index lists in which engines store a request's keys, and conversions between them.
//!
//! The lists are INT32, as kernels read them; a [`PageTable`] has the numbers themselves.
//!
//! - [`PageTable`]: `[requests, columns]` pages (`block_table`, `page_table`), with lengths beside it.
//! - [`PageIndices`]: `kv_indptr`, `kv_indices` of pages, `last_page_len`.
//! - [`TokenIndices`]: `kv_indptr`, `kv_indices` of token slots, where pages need not be whole.
//! - [`Cumulative`](ascend_attention::attention::Cumulative): `cu_seqlens`, `qo_indptr`.

use ascend_attention::Violation;
use ascend_attention::attention::PerRequest;
use ascend_attention::spec::Rule;

use crate::kv::{PageTable, check_block_size, fill_slots};
use crate::rules;

/// Pages of each request, packed request after request, with the number of tokens in each last page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageIndices {
    kv_indptr: Vec<i32>,
    kv_indices: Vec<i32>,
    last_page_len: Vec<i32>,
}

/// Slots of the keys of each request, packed request after request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenIndices {
    kv_indptr: Vec<i32>,
    kv_indices: Vec<i32>,
}

fn overflow() -> Violation {
    Violation::new(&rules::LENGTHS_OVERFLOW, "more entries than INT32 counts", i32::MAX, "split the batch")
}

fn rows_match(table: &PageTable, lengths: &PerRequest) -> Result<(), Violation> {
    if table.requests() == lengths.lengths().len() {
        return Ok(());
    }
    Err(Violation::new(
        &rules::LENGTHS_BATCH,
        format_args!("{} lengths, a table of {} rows", lengths.lengths().len(), table.requests()),
        "as many of each",
        "make both from the same batch",
    ))
}

/// The part of `indices` that belongs to a request; nothing for a request that does not exist.
fn part<'a>(indptr: &[i32], indices: &'a [i32], request: usize) -> &'a [i32] {
    match indptr.get(request..) {
        // `check_lists` has refused starts that are negative, fall, or are past the end.
        Some([start, end, ..]) => &indices[*start as usize..*end as usize],
        _ => &[],
    }
}

/// Checks that `indptr` divides `indices`, none of which is negative, which would break `rule`.
fn check_lists(indptr: &[i32], indices: &[i32], rule: &'static Rule) -> Result<(), Violation> {
    let rises = indptr.is_sorted() && indptr.first() == Some(&0);
    let whole = indptr.last().map(|end| *end as usize) == Some(indices.len());
    if !rises || !whole {
        return Err(Violation::new(
            &rules::INDEX_SHAPE,
            format_args!("kv_indptr from {:?} to {:?}, {} kv_indices", indptr.first(), indptr.last(), indices.len()),
            "starts that rise from 0 to the number of indices",
            "give one start a request and the total behind them",
        ));
    }
    match indices.iter().find(|index| **index < 0) {
        None => Ok(()),
        Some(index) => Err(Violation::new(rule, index, "0 or more", "leave padding out of the list")),
    }
}

impl PageIndices {
    /// The three lists, checked.
    ///
    /// # Errors
    /// [`INDEX_SHAPE`](crate::rules::INDEX_SHAPE) if they do not fit together: a start for each request and the
    /// total; a last page of 1 to `page_size` tokens, or of 0 for a request without pages.
    /// [`TABLE_BLOCK`](crate::rules::TABLE_BLOCK) for a negative page, [`POOL_SIZE`](crate::rules::POOL_SIZE) for
    /// a page size that is 0 or no INT32.
    pub fn new(
        kv_indptr: Vec<i32>,
        kv_indices: Vec<i32>,
        last_page_len: Vec<i32>,
        page_size: usize,
    ) -> Result<Self, Violation> {
        check_block_size(page_size)?;
        check_lists(&kv_indptr, &kv_indices, &rules::TABLE_BLOCK)?;
        if kv_indptr.len() - 1 != last_page_len.len() {
            return Err(Violation::new(
                &rules::INDEX_SHAPE,
                format_args!("{} starts, {} last pages", kv_indptr.len(), last_page_len.len()),
                "one start more than last pages",
                "give one of each a request",
            ));
        }
        let lists = Self { kv_indptr, kv_indices, last_page_len };
        for (request, &last) in lists.last_page_len.iter().enumerate() {
            let pages = lists.pages(request).len();
            let fits = last >= 0 && last as usize <= page_size;
            if !fits || (last == 0) != (pages == 0) {
                return Err(Violation::new(
                    &rules::INDEX_SHAPE,
                    format_args!("last_page_len {last} of request {request}, which has {pages} pages"),
                    format_args!("1 to {page_size}, 0 without pages"),
                    "compute (length - 1) % page_size + 1",
                ));
            }
        }
        Ok(lists)
    }

    /// Converts a table.
    ///
    /// # Errors
    /// [`LENGTHS_BATCH`](crate::rules::LENGTHS_BATCH) for another number of lengths,
    /// [`TABLE_ROW`](crate::rules::TABLE_ROW) for a row that is too short,
    /// [`LENGTHS_OVERFLOW`](crate::rules::LENGTHS_OVERFLOW) for a page that is no INT32,
    /// [`POOL_SIZE`](crate::rules::POOL_SIZE) for a page size that is 0 or no INT32.
    pub fn from_table(table: &PageTable, lengths: &PerRequest, page_size: usize) -> Result<Self, Violation> {
        rows_match(table, lengths)?;
        let (mut kv_indptr, mut kv_indices) = (vec![0], Vec::new());
        let mut last_page_len = Vec::new();
        for (request, &len) in lengths.lengths().iter().enumerate() {
            for &page in table.used(request, len, page_size)? {
                kv_indices.push(i32::try_from(page).map_err(|_| overflow())?);
            }
            // A table has fewer entries than INT32 counts, and a last page no more tokens than a page.
            kv_indptr.push(kv_indices.len() as i32);
            last_page_len.push(match len {
                0 => 0,
                len => ((len - 1) % page_size + 1) as i32,
            });
        }
        Self::new(kv_indptr, kv_indices, last_page_len, page_size)
    }

    /// The table and the lengths that these lists stand for.
    ///
    /// # Errors
    /// [`POOL_SIZE`](crate::rules::POOL_SIZE) for a page size that is 0 or no INT32;
    /// [`INDEX_SHAPE`](crate::rules::INDEX_SHAPE) for pages smaller than a last one of the lists, and for a table that
    /// does not fit in the host's memory.
    pub fn to_table(&self, page_size: usize) -> Result<(PageTable, PerRequest), Violation> {
        check_block_size(page_size)?;
        let mut last = self.last_page_len.iter();
        if let Some(longest) = last.find(|last| **last as usize > page_size) {
            return Err(Violation::new(
                &rules::INDEX_SHAPE,
                format_args!("last_page_len {longest} in pages of {page_size}"),
                format_args!("at most {page_size}"),
                "give the page size that the lists were made for",
            ));
        }
        let requests = 0..self.last_page_len.len();
        let row = |request| self.pages(request).iter().map(|page| *page as usize);
        let rows: Vec<Vec<usize>> = requests.map(|request| row(request).collect()).collect();
        let lengths = (rows.iter().zip(&self.last_page_len)).map(|(pages, last)| match pages.len() {
            0 => 0,
            pages => (pages - 1) * page_size + *last as usize,
        });
        Ok((PageTable::from_rows(&rows)?, PerRequest::new(lengths.collect())?))
    }

    /// The pages of a request.
    pub fn pages(&self, request: usize) -> &[i32] {
        part(&self.kv_indptr, &self.kv_indices, request)
    }

    /// `kv_indptr`: where each request's pages begin, and at the end their total number.
    pub fn kv_indptr(&self) -> &[i32] {
        &self.kv_indptr
    }

    /// `kv_indices`: the pages.
    pub fn kv_indices(&self) -> &[i32] {
        &self.kv_indices
    }

    /// `last_page_len`: tokens in each last page.
    pub fn last_page_len(&self) -> &[i32] {
        &self.last_page_len
    }
}

impl TokenIndices {
    /// The two lists, checked.
    ///
    /// # Errors
    /// [`INDEX_SHAPE`](crate::rules::INDEX_SHAPE), [`SLOT_RANGE`](crate::rules::SLOT_RANGE) for a negative slot.
    pub fn new(kv_indptr: Vec<i32>, kv_indices: Vec<i32>) -> Result<Self, Violation> {
        check_lists(&kv_indptr, &kv_indices, &rules::SLOT_RANGE)?;
        Ok(Self { kv_indptr, kv_indices })
    }

    /// The slots of every key of a table; with a window, of the last `window` keys of each request.
    ///
    /// # Errors
    /// [`LENGTHS_BATCH`](crate::rules::LENGTHS_BATCH), [`TABLE_ROW`](crate::rules::TABLE_ROW),
    /// [`SLOT_RANGE`](crate::rules::SLOT_RANGE), [`LENGTHS_OVERFLOW`](crate::rules::LENGTHS_OVERFLOW),
    /// [`POOL_SIZE`](crate::rules::POOL_SIZE) for a page size that is 0 or no INT32.
    pub fn from_table(
        table: &PageTable,
        lengths: &PerRequest,
        page_size: usize,
        window: Option<usize>,
    ) -> Result<Self, Violation> {
        rows_match(table, lengths)?;
        let mut lists = Self { kv_indptr: vec![0], kv_indices: Vec::new() };
        for (request, &len) in lengths.lengths().iter().enumerate() {
            let used = table.used(request, len, page_size)?;
            let first = window.map_or(0, |window| len.saturating_sub(window));
            fill_slots(used, first..len, page_size, &mut lists.kv_indices)?;
            let end = i32::try_from(lists.kv_indices.len()).map_err(|_| overflow())?;
            lists.kv_indptr.push(end);
        }
        Ok(lists)
    }

    /// The table and lengths that the slots stand for.
    ///
    /// # Errors
    /// [`INDEX_MISALIGNED`](crate::rules::INDEX_MISALIGNED) where the slots of a page's keys are not contiguous, or
    /// do not begin at the beginning of a page of the cache: operators that read pages cannot read such keys.
    /// [`POOL_SIZE`](crate::rules::POOL_SIZE) for a page size that is 0 or no INT32.
    pub fn to_table(&self, page_size: usize) -> Result<(PageTable, PerRequest), Violation> {
        check_block_size(page_size)?;
        let requests = self.kv_indptr.len() - 1;
        let mut rows = Vec::with_capacity(requests);
        let mut lengths = Vec::with_capacity(requests);
        for request in 0..requests {
            let slots = self.slots(request);
            lengths.push(slots.len());
            let mut row = Vec::with_capacity(slots.len().div_ceil(page_size));
            for page in slots.chunks(page_size) {
                let first = page[0] as usize;
                let mut slots = page.iter().zip(first..);
                let contiguous = slots.all(|(slot, wanted)| *slot as usize == wanted);
                if !contiguous || !first.is_multiple_of(page_size) {
                    return Err(rules::INDEX_MISALIGNED.broken(
                        format_args!("slots {first}, ... of request {request}"),
                        format_args!("runs of {page_size} slots that begin at a multiple of {page_size}"),
                    ));
                }
                row.push(first / page_size);
            }
            rows.push(row);
        }
        Ok((PageTable::from_rows(&rows)?, PerRequest::new(lengths)?))
    }

    /// The slots of a request.
    pub fn slots(&self, request: usize) -> &[i32] {
        part(&self.kv_indptr, &self.kv_indices, request)
    }

    /// `kv_indptr`: where each request's slots begin, and at the end their total number.
    pub fn kv_indptr(&self) -> &[i32] {
        &self.kv_indptr
    }

    /// `kv_indices`: the slots.
    pub fn kv_indices(&self) -> &[i32] {
        &self.kv_indices
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

    #[test]
    fn lists_of_a_small_batch() {
        let table = PageTable::from_rows(&[vec![4, 2], vec![7]]).unwrap();
        let pages = PageIndices::from_table(&table, &per(&[5, 4]), 4).unwrap();
        assert_eq!(pages.kv_indptr(), [0, 2, 3]);
        assert_eq!(pages.kv_indices(), [4, 2, 7]);
        assert_eq!(pages.last_page_len(), [1, 4]);
        let tokens = TokenIndices::from_table(&table, &per(&[5, 4]), 4, Some(2)).unwrap();
        assert_eq!(tokens.kv_indices(), [19, 8, 30, 31]);
        assert_eq!(tokens.kv_indptr(), [0, 2, 4]);
    }

    #[test]
    fn keys_that_are_no_pages_are_refused() {
        for slots in [vec![1, 2], vec![4, 6], vec![4, 5, 6, 7, 9], vec![5, 4]] {
            let end = slots.len() as i32;
            let tokens = TokenIndices::new(vec![0, end], slots).unwrap();
            let error = tokens.to_table(4).unwrap_err();
            assert_eq!(error.rule, &rules::INDEX_MISALIGNED);
        }
        let tokens = TokenIndices::new(vec![0, 5], vec![4, 5, 6, 7, 0]).unwrap();
        assert_eq!(tokens.to_table(4).unwrap().0.blocks(), [1, 0]);
        assert_eq!(tokens.to_table(0).unwrap_err().rule, &rules::POOL_SIZE);
        let pages = tokens.to_table(i32::MAX as usize).unwrap_err();
        assert_eq!(pages.rule, &rules::INDEX_MISALIGNED);
        let pages = tokens.to_table(usize::MAX).unwrap_err();
        assert_eq!(pages.rule, &rules::POOL_SIZE);
        let sixteen = PageIndices::new(vec![0, 2], vec![3, 4], vec![5], 16).unwrap();
        assert_eq!(sixteen.to_table(2).unwrap_err().rule, &rules::INDEX_SHAPE);
        assert_eq!(sixteen.to_table(0).unwrap_err().rule, &rules::POOL_SIZE);
        assert_eq!(sixteen.to_table(16).unwrap().1.lengths(), [21]);
    }

    #[test]
    fn lists_that_do_not_belong_together_are_refused() {
        let rule = |indptr: &[i32], indices: &[i32], last: &[i32]| {
            let lists = PageIndices::new(indptr.to_vec(), indices.to_vec(), last.to_vec(), 4);
            lists.unwrap_err().rule
        };
        assert_eq!(rule(&[], &[], &[]), &rules::INDEX_SHAPE);
        assert_eq!(rule(&[1, 2], &[1, 2], &[1]), &rules::INDEX_SHAPE);
        assert_eq!(rule(&[0, 3], &[1, 2], &[1]), &rules::INDEX_SHAPE);
        assert_eq!(rule(&[0, 2, 1, 2], &[1, 2], &[1, 1, 1]), &rules::INDEX_SHAPE);
        assert_eq!(rule(&[0, 2], &[1, 2], &[5]), &rules::INDEX_SHAPE);
        assert_eq!(rule(&[0, 2], &[1, 2], &[0]), &rules::INDEX_SHAPE);
        assert_eq!(rule(&[0, 0], &[], &[1]), &rules::INDEX_SHAPE);
        assert_eq!(rule(&[0, 2], &[1, -2], &[1]), &rules::TABLE_BLOCK);
        let wrong = TokenIndices::new(vec![0, 2], vec![1, -2]);
        assert_eq!(wrong.unwrap_err().rule, &rules::SLOT_RANGE);
        let table = PageTable::from_rows(&[vec![4]]).unwrap();
        let wrong = PageIndices::from_table(&table, &per(&[1, 1]), 4);
        assert_eq!(wrong.unwrap_err().rule, &rules::LENGTHS_BATCH);
        let wrong = PageIndices::from_table(&table, &per(&[5]), 4);
        assert_eq!(wrong.unwrap_err().rule, &rules::TABLE_ROW);
        let wrong = PageIndices::from_table(&table, &per(&[1]), 0);
        assert_eq!(wrong.unwrap_err().rule, &rules::POOL_SIZE);
    }

    proptest! {
        #[test]
        fn formats_convert_both_ways(
            rows in prop::collection::vec((prop::collection::vec(0usize..99, 0..5), any::<usize>()), 1..6),
            page in 1usize..20,
        ) {
            // A length that fills the row up to its last page.
            let lengths: Vec<usize> = rows.iter().map(|(row, cut)| match row.len() {
                0 => 0,
                pages => (pages - 1) * page + 1 + cut % page,
            }).collect();
            let rows: Vec<_> = rows.into_iter().map(|(row, _)| row).collect();
            let (table, lengths) = (PageTable::from_rows(&rows).unwrap(), per(&lengths));
            let pages = PageIndices::from_table(&table, &lengths, page).unwrap();
            prop_assert_eq!(pages.to_table(page).unwrap(), (table.clone(), lengths.clone()));
            let tokens = TokenIndices::from_table(&table, &lengths, page, None).unwrap();
            prop_assert_eq!(tokens.to_table(page).unwrap(), (table.clone(), lengths.clone()));
            for window in [0, 1, 7, usize::MAX] {
                let last = TokenIndices::from_table(&table, &lengths, page, Some(window)).unwrap();
                for request in 0..rows.len() {
                    let all = tokens.slots(request);
                    let from = all.len() - all.len().min(window);
                    prop_assert_eq!(last.slots(request), &all[from..]);
                }
            }
        }
    }
}
