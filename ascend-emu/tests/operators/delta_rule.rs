//! The operators of the gated delta rule through their C functions: numbers, and what leads outside of a pool.

use crate::bench::*;
use ascend_emu::abi::*;
use ascend_emu::{Check, FindingKind, check_scope, findings};
use ascend_sys::bindings::{aclDataType, aclOpExecutor};
use half::bf16;
use std::ffi::c_void;
use std::ptr::{null, null_mut};

const WORKSPACE: u64 = 16 << 20;

fn halves(numbers: &[f32]) -> *mut c_void {
    upload(&numbers.iter().map(|&number| bf16::from_f32(number)).collect::<Vec<_>>())
}

fn floats(place: *mut c_void, count: usize) -> Vec<f32> {
    download::<bf16>(place, count).into_iter().map(bf16::to_f32).collect()
}

/// A step of sequences with one head, values of one element and keys of two: keys and queries are `[1, 0]`, and each
/// token corrects half of what its value, 8, and its state differ by. Returns the statuses and the outputs.
fn step(
    lengths: &[i32],
    slots: &[i32],
    accepted: Option<&[i32]>,
    pool: *mut c_void,
    states: i64,
) -> ([i32; 3], Vec<f32>) {
    let tokens = slots.len();
    let t = tokens as i64;
    let half = |shape: &[i64], data| tensor(aclDataType::ACL_BF16, shape, data);
    let ints = |numbers: &[i32]| tensor(aclDataType::ACL_INT32, &[numbers.len() as i64], upload(numbers));
    let keys = halves(&[1.0, 0.0].repeat(tokens));
    let out = halves(&vec![-1.0; tokens]);
    let (stream, workspace) = (stream(), Memory::new(WORKSPACE as usize));
    let (mut bytes, mut executor) = (0, null_mut::<aclOpExecutor>());
    let statuses = unsafe {
        [
            aclnnRecurrentGatedDeltaRuleGetWorkspaceSize(
                half(&[t, 1, 2], keys),
                half(&[t, 1, 2], keys),
                half(&[t, 1, 1], halves(&vec![8.0; tokens])),
                half(&[t, 1], halves(&vec![0.5; tokens])),
                half(&[states, 1, 1, 2], pool),
                ints(lengths),
                ints(slots),
                null(),
                null(),
                accepted.map_or(null(), |counts| ints(counts).cast_const()),
                2.0,
                half(&[t, 1, 1], out),
                &mut bytes,
                &mut executor,
            ),
            aclnnRecurrentGatedDeltaRule(workspace.at, WORKSPACE, executor, stream),
            aclrtSynchronizeStream(stream),
        ]
    };
    (statuses, floats(out, tokens))
}

#[test]
fn states_are_corrected_and_written_behind_each_token() {
    let _bench = Bench::new();
    let pool = halves(&[0.0, 0.0, 0.0, 0.0, 4.0, 1.0, 0.0, 0.0]);
    // Sequence 0 goes on from slot 2; the outputs are doubled by the scale.
    let (statuses, out) = step(&[2, 1], &[2, 0, 3], None, pool, 4);
    assert_eq!(statuses, [0; 3], "{}", message());
    assert_eq!(out, [12.0, 14.0, 8.0]);
    assert_eq!(floats(pool, 8), [7.0, 1.0, 0.0, 0.0, 6.0, 1.0, 4.0, 0.0]);
    // One of two tokens was accepted: the step goes on from its slot, and the other is taken back by that.
    let (statuses, out) = step(&[2], &[2, 0], Some(&[1]), pool, 4);
    assert_eq!((statuses, out), ([0; 3], vec![14.0, 15.0]));
    let (statuses, out) = step(&[2], &[2, 0], Some(&[2]), pool, 4);
    assert_eq!((statuses, out), ([0; 3], vec![15.5, 15.75]));
}

/// Lengths, slots and accepted counts.
type Numbers = (&'static [i32], &'static [i32], Option<&'static [i32]>);

#[test]
fn numbers_that_lead_out_of_the_pool_are_named_and_write_nothing() {
    let _bench = Bench::new();
    let cases: [(Numbers, FindingKind, &str); 6] = [
        ((&[1, 1], &[-1, 2], None), FindingKind::SlotOutOfRange, "slot -1 of token 0, allowed: 0 to 3"),
        ((&[1, 1], &[2, 4], None), FindingKind::SlotOutOfRange, "slot 4 of token 1"),
        ((&[9], &[0; 9], None), FindingKind::SequenceLength, "9 tokens of sequence 0, allowed: 0 to 8"),
        ((&[1, 2], &[0, 1], None), FindingKind::SequenceLength, "2 tokens of sequence 1, allowed: 0 to 1"),
        ((&[2], &[0, 1], Some(&[3])), FindingKind::SequenceLength, "3 accepted tokens of sequence 0, allowed: 1 to 2"),
        ((&[1, 1], &[3, 3], None), FindingKind::DuplicateSlot, "slot 3 of sequences 0 and 1"),
    ];
    for ((lengths, slots, accepted), kind, text) in cases {
        let states = 4.max(slots.len() as i64);
        let pool = halves(&vec![1.0; 2 * states as usize]);
        let seen = findings().len();
        let (statuses, out) = step(lengths, slots, accepted, pool, states);
        assert_eq!(statuses, [0; 3], "{}", message());
        let found = &findings()[seen..];
        let named = found.iter().find(|finding| finding.kind == kind && finding.message.contains(text));
        assert!(named.is_some(), "{text}: {found:?}");
        if kind == FindingKind::SlotOutOfRange {
            let left_out = lengths.iter().zip(slots).position(|(_, &slot)| !(0..4).contains(&slot)).unwrap();
            assert_eq!(out[left_out], -1.0, "the row of a sequence that is left out is not written");
        }
        let _strict = check_scope(Check::Strict);
        let pool = halves(&vec![1.0; 2 * states as usize]);
        let (statuses, _) = step(lengths, slots, accepted, pool, states);
        assert_ne!(statuses[2], 0, "{text}");
        assert!(message().contains(text), "{}", message());
    }
}

#[test]
fn states_that_nothing_has_written_are_found_by_their_slot() {
    let _bench = Bench::new();
    let pool = malloc(4 * 2 * 2);
    // The states of slots 2 and 3.
    let written = halves(&[0.0; 4]);
    ok(unsafe { aclrtMemcpy(pool.wrapping_byte_add(8), 8, written, 8, D2D) });
    let check = check_scope(Check::Strict);
    let (statuses, _) = step(&[1, 2], &[2, 3, 1], None, pool, 4);
    assert_eq!(statuses, [0; 3], "{}", message());
    // Slot 1 has been written since, and slot 0 has not.
    let (statuses, _) = step(&[1], &[1], None, pool, 4);
    assert_eq!(statuses, [0; 3], "{}", message());
    let (statuses, _) = step(&[1, 1], &[2, 0], None, pool, 4);
    assert_eq!(statuses[..2], [0; 2]);
    assert_ne!(statuses[2], 0);
    assert!(message().contains("stateRef"), "{}", message());
    drop(check);
}
