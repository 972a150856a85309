//! Checks of a step's slots, table and lengths against each other.

use std::collections::HashMap;

use ascend_attention::Violation;

use crate::rules;

use super::pad::PadPolicy;
use super::slot::{check_tokens, count_slots, slot};
use super::slot_check::check_slots;
use super::table::{PageTable, check_blocks_of};

/// The lengths of one request in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AuditRequest {
    /// Tokens before the step, from the token in the first entry of the request's row on.
    pub cached: usize,
    /// The number of cached tokens, the first ones, that were given back, as tokens before a window are: their
    /// entries of the row mean nothing. For a row from [`Sequence::row`](super::Sequence::row) it is
    /// [`Sequence::given_back`](super::Sequence::given_back); a [`BatchRequest`](crate::BatchRequest) has no such
    /// entries.
    pub given_back: usize,
    /// Tokens that the step adds.
    pub new: usize,
}

impl AuditRequest {
    /// A request that adds `new` tokens to `cached` ones, of which none was given back.
    pub const fn new(cached: usize, new: usize) -> Self {
        Self { cached, given_back: 0, new }
    }

    /// Sets the number of cached tokens that were given back.
    pub const fn given_back(mut self, tokens: usize) -> Self {
        self.given_back = tokens;
        self
    }
}

/// A step as the operators will see it, to be checked against its lengths.
///
/// An engine runs the check where a wrong slot would go unnoticed: the operators do not check, but write to the slots
/// and read the blocks of the table that they are given.
#[derive(Clone, Debug)]
pub struct Audit<'a> {
    /// Blocks of the cache.
    pub blocks: usize,
    /// Tokens in a block.
    pub block_size: usize,
    /// What padding writes.
    pub pad: PadPolicy,
    /// The requests, in the order of the rows. Rows after them are padding.
    pub requests: &'a [AuditRequest],
    /// The block table.
    pub table: &'a PageTable,
    /// The slots of the packed tokens as the device gets them, INT32. Entries after the requests' tokens are padding.
    pub slots: &'a [i32],
}

/// A request with the blocks of its row.
struct RequestBlocks<'a> {
    cached: usize,
    new: usize,
    /// The blocks of its tokens, those that were given back included.
    used: &'a [usize],
    /// The blocks that were not given back. Blocks that the step writes to were never given back.
    held: &'a [usize],
}

impl Audit<'_> {
    /// Looks for a fault.
    ///
    /// # Errors
    /// The first fault: [`POOL_SIZE`](crate::rules::POOL_SIZE) for a cache without slots, or with more than INT32
    /// counts; then of the requests in their order [`LENGTHS_OVERFLOW`](crate::rules::LENGTHS_OVERFLOW),
    /// [`TABLE_ROW`](crate::rules::TABLE_ROW), [`TABLE_BLOCK`](crate::rules::TABLE_BLOCK); then of the slots
    /// [`SLOT_COUNT`](crate::rules::SLOT_COUNT), [`SLOT_RANGE`](crate::rules::SLOT_RANGE),
    /// [`SLOT_DUPLICATE`](crate::rules::SLOT_DUPLICATE), [`SLOT_DUMP`](crate::rules::SLOT_DUMP),
    /// [`SLOT_POSITION`](crate::rules::SLOT_POSITION); then [`TABLE_SHARED`](crate::rules::TABLE_SHARED).
    pub fn check(&self) -> Result<(), Violation> {
        count_slots(self.blocks, self.block_size)?;
        let requests = (self.requests.iter().enumerate())
            .map(|(request, lengths)| self.check_request(request, lengths))
            .collect::<Result<Vec<_>, _>>()?;
        self.check_count(&requests)?;
        check_slots(self.slots, self.blocks, self.block_size, self.pad)?;
        self.check_positions(&requests)?;
        self.check_sharing(&requests)
    }

    /// Checks the lengths of a request, and that its blocks are of the cache.
    fn check_request(&self, request: usize, lengths: &AuditRequest) -> Result<RequestBlocks<'_>, Violation> {
        let AuditRequest { cached, given_back, new } = *lengths;
        let len = check_tokens(cached, new, format_args!("request {request}"))?;
        let used = self.table.used(request, len, self.block_size)?;
        let held = &used[given_back.min(cached) / self.block_size..];
        // A dump block is found by the slots in it: a dump block that is only read holds what padding wrote, but
        // exists.
        check_blocks_of(request, held, self.blocks)?;
        Ok(RequestBlocks { cached, new, used, held })
    }

    /// Checks that there is a slot for each new token, and only padding after them.
    fn check_count(&self, requests: &[RequestBlocks<'_>]) -> Result<(), Violation> {
        let tokens: usize = requests.iter().map(|request| request.new).sum();
        let Some(padding) = self.slots.get(tokens..) else {
            return Err(rules::SLOT_COUNT.broken(
                format_args!("{} slots", self.slots.len()),
                format_args!("{tokens}, the new tokens of the batch, or more with padding"),
            ));
        };
        let wrong = |slot: &&i32| !self.pad.is_padding(**slot, self.block_size);
        match padding.iter().find(wrong) {
            None => Ok(()),
            Some(slot) => Err(Violation::new(
                &rules::SLOT_COUNT,
                format_args!("slot {slot} behind the batch's {tokens} tokens"),
                "padding",
                "fill the slots of padding tokens by the pad policy",
            )),
        }
    }

    /// Checks that each token's slot is that of its position.
    fn check_positions(&self, requests: &[RequestBlocks<'_>]) -> Result<(), Violation> {
        let mut slots = self.slots.iter();
        for (request, blocks) in requests.iter().enumerate() {
            for (&given, position) in slots.by_ref().take(blocks.new).zip(blocks.cached..) {
                // An INT32, as every slot.
                let wanted = slot(blocks.used, position, self.block_size)? as i32;
                if self.pad.is_padding(wanted, self.block_size) {
                    return Err(rules::SLOT_DUMP.broken(
                        format_args!("slot {wanted} for position {position} of request {request}"),
                        "a slot that padding is not written to",
                    ));
                }
                if given != wanted {
                    return Err(rules::SLOT_POSITION
                        .broken(format_args!("slot {given} for position {position} of request {request}"), wanted));
                }
            }
        }
        Ok(())
    }

    /// Checks that no request reads a block that another one writes.
    fn check_sharing(&self, requests: &[RequestBlocks<'_>]) -> Result<(), Violation> {
        let mut writers: HashMap<usize, usize> = HashMap::new();
        for (request, blocks) in requests.iter().enumerate() {
            if blocks.new > 0 {
                let written = &blocks.used[blocks.cached / self.block_size..];
                writers.extend(written.iter().map(|block| (*block, request)));
            }
        }
        for (request, blocks) in requests.iter().enumerate() {
            let mut written = (blocks.held.iter())
                .filter_map(|block| Some((block, writers.get(block)?)))
                .filter(|(_, writer)| **writer != request);
            if let Some((block, writer)) = written.next() {
                return Err(rules::TABLE_SHARED.broken(
                    format_args!("block {block} of request {request}, which request {writer} writes"),
                    "a block that no other request of the batch writes",
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    struct Step {
        requests: Vec<AuditRequest>,
        rows: Vec<Vec<usize>>,
        slots: Vec<i32>,
        pad: PadPolicy,
    }

    impl Step {
        /// Two requests over a shared first block: one of 6 cached tokens and 3 new, one of 4 and 1.
        fn right() -> Self {
            Self {
                requests: vec![AuditRequest::new(6, 3), AuditRequest::new(4, 1)],
                rows: vec![vec![1, 2, 3], vec![1, 5]],
                slots: vec![10, 11, 12, 20, -1, -1],
                pad: PadPolicy::SkipNegative,
            }
        }

        fn fault(&self) -> &'static ascend_attention::spec::Rule {
            self.check().unwrap_err().rule
        }

        fn check(&self) -> Result<(), Violation> {
            Audit {
                blocks: 6,
                block_size: 4,
                pad: self.pad,
                requests: &self.requests,
                table: &PageTable::from_rows(&self.rows)?,
                slots: &self.slots,
            }
            .check()
        }
    }

    #[test]
    fn a_right_step_has_no_fault() {
        assert_eq!(Step::right().check(), Ok(()));
    }

    #[test]
    fn entries_of_blocks_given_back_have_no_holder() {
        let mut step = Step::right();
        step.rows = vec![vec![0, 5, 3], vec![1, 0]];
        step.slots = vec![22, 23, 12, 0];
        // The first request reads block 0, which the second one writes.
        assert_eq!(step.fault(), &rules::TABLE_SHARED);
        step.requests[0].given_back = 4;
        assert_eq!(step.check(), Ok(()));
        // Within a block it is still held; what is written to never was given back.
        step.requests[0].given_back = 3;
        assert_eq!(step.fault(), &rules::TABLE_SHARED);
        step.rows[0][2] = 6;
        step.requests[0].given_back = usize::MAX;
        assert_eq!(step.fault(), &rules::TABLE_BLOCK);
        step.rows[0] = vec![6, 5, 3];
        assert_eq!(step.check(), Ok(()));
    }

    #[test]
    fn the_first_fault_is_named() {
        let with = |change: fn(&mut Step)| {
            let mut step = Step::right();
            change(&mut step);
            step.fault()
        };
        assert_eq!(with(|s| s.requests[0].cached = usize::MAX), &rules::LENGTHS_OVERFLOW);
        assert_eq!(with(|s| s.requests[0].cached = 40), &rules::TABLE_ROW);
        assert_eq!(with(|s| s.rows[0][2] = 6), &rules::TABLE_BLOCK);
        assert_eq!(with(|s| s.rows[1][0] = usize::MAX), &rules::TABLE_BLOCK);
        assert_eq!(with(|s| s.slots.truncate(3)), &rules::SLOT_COUNT);
        assert_eq!(with(|s| s.slots[5] = 0), &rules::SLOT_COUNT);
        assert_eq!(with(|s| s.slots[3] = 24), &rules::SLOT_RANGE);
        assert_eq!(with(|s| s.slots[3] = 10), &rules::SLOT_DUPLICATE);
        assert_eq!(with(|s| s.slots[3] = 21), &rules::SLOT_POSITION);
        assert_eq!(with(|s| s.slots[3] = -1), &rules::SLOT_POSITION);
        assert_eq!(with(|s| s.rows[1][0] = 2), &rules::TABLE_SHARED);
        let dump = |s: &mut Step| {
            s.pad = PadPolicy::DumpSlot(20);
            s.slots.truncate(4);
        };
        assert_eq!(with(dump), &rules::SLOT_DUMP);
    }
}
