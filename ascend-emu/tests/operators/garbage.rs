//! Calls of any attributes and shapes end in a status, never in a panic or in touched memory of others.

use crate::bench::*;
use ascend_emu::abi::*;
use ascend_sys::bindings::aclDataType;
use proptest::prelude::*;
use std::ffi::CString;
use std::ptr::{null, null_mut};

/// Statuses of errors inside the emulator.
const INTERNAL: [i32; 3] = [500_000, 561_000, 507_000];

fn number() -> impl Strategy<Value = i64> {
    prop_oneof![
        6 => -3i64..6,
        2 => Just(16),
        1 => Just(2_147_483_647),
        1 => Just(i64::MAX),
        1 => Just(i64::MIN),
        1 => any::<i64>(),
    ]
}

fn shape() -> impl Strategy<Value = Vec<i64>> {
    prop_oneof![
        3 => Just(vec![1, 2, 3, 16]),
        1 => Just(vec![2, 3, 32]),
        3 => prop::collection::vec(0i64..5, 0..6),
    ]
}

fn layout() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => Just("BNSD".to_owned()),
        2 => Just("BSND".to_owned()),
        2 => Just("BSH".to_owned()),
        1 => Just("BNSD_BSND".to_owned()),
        1 => Just("TND".to_owned()),
        1 => "[A-Z_]{0,9}",
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

    #[test]
    fn a_status_comes_of_every_call(
        layout in layout(),
        shapes in prop::collection::vec(shape(), 5),
        same in any::<bool>(),
        dtypes in prop::collection::vec(prop_oneof![8 => Just(1), 2 => Just(27), 1 => -2i32..45], 5),
        attributes in prop::collection::vec(number(), 9),
        scale in any::<f64>(),
        lse in any::<bool>(),
        lengths in prop::option::of(prop::collection::vec(number(), 0..3)),
        absent in 0u8..64,
        changed in prop::collection::vec(prop::bool::weighted(0.1), 11),
    ) {
        let _bench = Bench::new();
        // Half of the calls are right but for a change or two.
        let kept = |i: usize| same && !changed[i];
        let right_shape = vec![1, 2, 3, 16];
        let first = if kept(9) { &right_shape } else { &shapes[0] };
        let layout = if kept(10) { "BNSD".to_owned() } else { layout };
        let memory = malloc(1 << 20);
        let guard = upload(&[0xA5u8; 4096]);
        let make = |place: usize| {
            let shape = if same { first } else { &shapes[place] };
            let dtype = aclDataType(if same { dtypes[0] } else { dtypes[place] });
            let data = memory.wrapping_byte_add(place << 16);
            unsafe {
                aclCreateTensor(shape.as_ptr(), shape.len() as u64, dtype, null(), 0,
                    ascend_sys::bindings::aclFormat::ACL_FORMAT_ND, shape.as_ptr(), shape.len() as u64, data)
            }
        };
        let tensors: Vec<_> = (0..5).map(make).collect();
        let given = |bit: u8| absent & (1 << bit) == 0 || same;
        let pick = |place: usize| if given(place as u8) { tensors[place].cast_const() } else { null() };
        let list_of = |place: usize| unsafe { aclCreateTensorList(&pick(place), 1) };
        let (key, value) = (list_of(1), list_of(2));
        let ints = lengths.as_ref().map_or(null_mut(), |l| unsafe { aclCreateIntArray(l.as_ptr(), l.len() as u64) });
        let layout = CString::new(layout).unwrap();
        let mask = if same { null() } else { pick(3) };
        let (mut bytes, mut executor) = (0, null_mut());
        const RIGHT: [i64; 8] = [2, 2_147_483_647, 2_147_483_647, 0, 0, 0, 0, 0];
        let a = |i: usize| if kept(i) { RIGHT[i] } else { attributes[i] };
        let status = unsafe {
            aclnnFusedInferAttentionScoreGetWorkspaceSize(
                pick(0), key, value, null(), mask, ints, ints, null(), null(), null(), null(), null(), null(),
                null(), null(), null(), null(), a(0), scale, a(1), a(2), layout.as_ptr().cast_mut(), a(3), a(4),
                a(5), a(6), a(7), lse, pick(4), null(), &mut bytes, &mut executor)
        };
        prop_assert!(!INTERNAL.contains(&status), "{status}: {}", message());
        prop_assert_eq!(status != 0, executor.is_null());
        if status == 0 {
            let workspace = malloc(16 << 20);
            ok(unsafe { aclnnFusedInferAttentionScore(workspace, 16 << 20, executor, null_mut()) });
            let synced = unsafe { aclrtSynchronizeStream(null_mut()) };
            prop_assert!(!INTERNAL.contains(&synced), "{synced}: {}", message());
            free(workspace);
        } else {
            prop_assert!(!message().is_empty());
        }
        prop_assert_eq!(download::<u8>(guard, 4096), vec![0xA5; 4096]);
        unsafe {
            for (list, place) in [(key, 1), (value, 2)] {
                // A list destroys its member.
                if list.is_null() {
                    aclDestroyTensor(tensors[place]);
                } else {
                    ok(aclDestroyTensorList(list));
                }
            }
            for place in [0, 3, 4] {
                aclDestroyTensor(tensors[place]);
            }
            aclDestroyIntArray(ints);
        }
        free(guard);
        free(memory);
    }
}
