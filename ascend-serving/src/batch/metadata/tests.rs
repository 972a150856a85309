//! Tests of metadata.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use super::super::RecordedBatch;
use super::super::example::{request, settings};
use super::*;
use crate::kv::{Audit, AuditRequest};
use proptest::prelude::*;

#[test]
fn a_mixed_batch() {
    let requests = [request(5, 1, &[3, 9]), request(2, 4, &[7, 1, 50])];
    let metadata = AttentionMetadata::new(&requests, settings()).unwrap();
    assert_eq!(metadata.state(), AttentionState::ChunkedPrefill);
    assert_eq!(metadata.q_ends().ends(), [1, 5]);
    assert_eq!(metadata.kv_lengths().lengths(), [6, 6]);
    assert_eq!(metadata.slots(), [37, 30, 31, 4, 5]);
    assert_eq!(metadata.table().blocks(), [3, 9, 7, 1]);
    assert_eq!((metadata.decodes(), metadata.decode_tokens()), (1, 1));
    assert!(metadata.decodes_lead());
    assert_eq!((metadata.prefills(), metadata.prefill_tokens()), (1, 4));
}

#[test]
fn the_first_fault_is_named() {
    let rule = |requests: &[BatchRequest<'_>]| AttentionMetadata::new(requests, settings()).unwrap_err().rule;
    let good = request(5, 1, &[3, 9]);
    assert_eq!(rule(&[]), &rules::BATCH_EMPTY);
    assert_eq!(rule(&[good, request(5, 0, &[3])]), &rules::BATCH_EMPTY);
    assert_eq!(rule(&[good.drafts(1)]), &rules::DRAFT_COUNT);
    assert_eq!(rule(&[request(usize::MAX, 1, &[3])]), &rules::LENGTHS_OVERFLOW);
    assert_eq!(rule(&[request(7, 2, &[3, 9])]), &rules::TABLE_ROW);
    assert_eq!(rule(&[request(7, 1, &[3, 64])]), &rules::TABLE_BLOCK);
    assert_eq!(rule(&[request(11, 1, &[3, 5, 3])]), &rules::TABLE_REPEATED);
    assert_eq!(rule(&[good, good]), &rules::SLOT_DUPLICATE);
    let dump = BatchSettings { pad: PadPolicy::DumpSlot(37), ..settings() };
    let error = AttentionMetadata::new(&[good], dump).unwrap_err();
    assert_eq!(error.rule, &rules::SLOT_DUMP);
}

#[test]
fn a_refused_batch_leaves_nothing_behind() {
    let good = request(5, 1, &[3, 9]);
    let mut metadata = AttentionMetadata::new(&[good], settings()).unwrap();
    assert!(metadata.renew(&[good, good]).is_err());
    assert_eq!((metadata.requests(), metadata.tokens()), (0, 0));
    assert!(metadata.slots().is_empty() && metadata.table().requests() == 0);
}

proptest! {
    /// Whatever the batch: recording loses nothing, renewing is making anew, and padding leaves the requests
    /// alone.
    #[test]
    fn metadata_of_any_batch(
        lengths in prop::collection::vec((0usize..30, 1usize..20, any::<usize>()), 1..8),
        more in 0usize..70,
    ) {
        let mut rows = Vec::new();
        let mut block = 0;
        for (cached, new, _) in &lengths {
            let blocks = (cached + new).div_ceil(4);
            rows.push((block..block + blocks).collect::<Vec<usize>>());
            block += blocks;
        }
        let requests = lengths.iter().zip(&rows).map(|((cached, new, drafts), row)| {
            let prompt_len = (drafts % 3 > 0).then_some(cached + drafts % 50);
            BatchRequest::in_row(row, *cached, *new).drafts(drafts % new).prompt_len(prompt_len)
        });
        let requests: Vec<_> = requests.collect();
        let settings = BatchSettings { blocks: 128, ..settings() };
        let metadata = AttentionMetadata::new(&requests, settings).unwrap();
        let recorded = RecordedBatch::new(settings, &requests);
        let read = RecordedBatch::from_json(&recorded.to_json()).unwrap();
        prop_assert_eq!(&read, &recorded);
        prop_assert_eq!(&read.metadata().unwrap(), &metadata);
        let mut again = AttentionMetadata::new(&[request(5, 1, &[3, 9])], settings).unwrap();
        again.renew(&read.requests()).unwrap();
        prop_assert_eq!(&again, &metadata);
        again.pad_to(metadata.tokens() + more).unwrap();
        prop_assert_eq!(again.tokens(), metadata.tokens() + more);
        prop_assert_eq!(again.slots().len(), again.tokens());
        prop_assert_eq!(&again.q_ends().ends()[..lengths.len()], metadata.q_ends().ends());
        prop_assert_eq!(again.kv_lengths().lengths().len(), again.table().requests());
        let q = again.q_ends().per_request();
        for (q, kv) in q.lengths().iter().zip(again.kv_lengths().lengths()).skip(lengths.len()) {
            prop_assert!(*q == *kv && (1..=16).contains(q));
        }
        let audit = |r: &BatchRequest<'_>| AuditRequest::new(r.cached, r.new);
        let audit = Audit {
            blocks: 128,
            block_size: 4,
            pad: settings.pad,
            requests: &requests.iter().map(audit).collect::<Vec<_>>(),
            table: again.table(),
            slots: again.slots(),
        };
        prop_assert_eq!(audit.check(), Ok(()));
    }
}
