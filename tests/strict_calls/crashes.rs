//! Calls of which the operator's host code dies: refused by name in strict mode, answered as by an aarch64 host in
//! compat.

use ascend_attention::spec::ops::fused_infer_attention_score::{Cache, Version};
use ascend_attention::spec::{Cann, DType, Extents, Layout, Soc, Target};
use ascend_attention::{Error, Stream};
use ascend_emu::{Check, FindingKind, check_scope, findings};

use super::calls::{Call, Random, desc};
use super::{raw, safe_layer, strictly_on, upload};

/// A call, the rule that names its crash, where that holds, and the status of a host that survives it.
struct Crash {
    rule: &'static str,
    call: Call,
    on: &'static [Cann],
    survivor: i32,
}

const REFUSED: i32 = 561_002;
/// Status of a call that strict mode fails and other hosts take.
const INNER: i32 = 561_000;

fn plain(layout: Layout, heads: i64, rows: i64, dim: i64) -> Call {
    let batch = if layout.is_packed() { 1 } else { 3 };
    let of = Extents { batch, heads, rows, dim };
    let mut call = Call::new(layout, DType::Bf16, of, 7);
    call.keys(DType::Bf16, of, dim);
    if layout.is_packed() {
        (call.q_lens, call.kv_lens) = (Some(vec![2, rows]), Some(vec![2, rows]));
    }
    call
}

/// Decode over an NZ cache of INT8 keys, with packed rows.
fn nz() -> Call {
    let (heads, rows) = (8, 3);
    let of = Extents { batch: 1, heads, rows, dim: 128 };
    let mut call = Call::new(Layout::Tnd, DType::Bf16, of, 8);
    call.q_lens = Some(vec![1, rows]);
    let dims = [1, 128, 128, 128];
    call.pages(Cache::Nz, DType::Int8, dims, &[40, 200], &mut Random(3));
    call.plain.inner_precise = 1;
    let scale = Some(desc(DType::Bf16, &[1, 128]));
    call.plain.key_antiquant_scale = scale;
    call.plain.value_antiquant_scale = scale;
    call
}

fn crashes() -> Vec<Crash> {
    use Cann::{V8_5, V9_0, V9_1};
    let crash = |rule, on, survivor, call| Crash { rule, call, on, survivor };
    let without_heads = |mut call: Call| {
        call.plain.num_heads = 0;
        call
    };
    let mut all = Vec::new();
    for (layout, on) in [
        (Layout::Bsh, &[V8_5, V9_0, V9_1][..]),
        (Layout::BshBnsd, &[V8_5, V9_0, V9_1]),
        (Layout::BshNbsd, &[V8_5, V9_0, V9_1]),
        (Layout::TndNtd, &[V9_0, V9_1]),
    ] {
        let call = without_heads(plain(layout, 2, 4, 64));
        all.push(crash("num_heads.zero", on, REFUSED, call));
    }
    for paged in [false, true] {
        let mut call = plain(Layout::Tnd, 2, 6, 96);
        if paged {
            let dims = [2, 16, 96, 96];
            call.pages(Cache::BnBsH, DType::Bf16, dims, &[2, 4], &mut Random(5));
        }
        call.plain.num_key_value_heads = 0;
        all.push(crash("split_fuse.kv_heads_zero", &[V9_0, V9_1], 0, call));
    }
    type Leave = fn(&mut Call);
    let without: [Leave; 3] =
        [|call| call.q_lens = None, |call| call.kv_lens = None, |call| call.plain.block_table = None];
    for leave in without {
        let mut call = nz();
        leave(&mut call);
        all.push(crash("antiquant.packed_nz_null", &[V9_0, V9_1], REFUSED, call));
    }
    for layout in [Layout::Bnsd, Layout::BnsdBsnd] {
        let mut call = plain(layout, 2, 4, 64);
        let one = desc(DType::Bf16, &[1, 2, 9, 64]);
        call.key = vec![one; 2];
        call.value = vec![one; 2];
        all.push(crash("key.list_short", &[V8_5, V9_0], REFUSED, call));
    }
    all
}

/// Crashes that were found since there were `before` findings, by the rule's name.
fn found(before: usize, rule: &str) -> usize {
    let named = format!(": {rule}: ");
    findings()[before..]
        .iter()
        .filter(|found| found.kind == FindingKind::HostCrash && found.message.contains(&named))
        .count()
}

#[test]
fn what_ends_the_host_process_is_refused_by_name_and_never_does_it_here() {
    for soc in [Soc::AtlasA2, Soc::AtlasA3] {
        for cann in Cann::ALL {
            let target = Target::new(soc, cann);
            strictly_on(target, |stream, _| {
                for crash in crashes() {
                    one(stream, target, crash);
                }
                let works = raw_call(&plain(Layout::Bnsd, 2, 4, 64), target);
                assert_eq!(works.0, 0, "the machine works on: {}", works.1);
            });
        }
    }
}

fn one(stream: &Stream, target: Target, crash: Crash) {
    let Crash { rule, on, .. } = crash;
    let mut call = crash.call;
    call.target = target;
    let context = format!("{rule}, {} on {target}", call.plain.input_layout);
    // 9.2 checks as 9.1 does, behind a layer that refuses numHeads of 0 and has one status for all refusals.
    let preview = target.cann == Cann::V9_2;
    let kept = preview && rule != "num_heads.zero" && on.contains(&Cann::V9_1);
    let dies = kept || on.contains(&target.cann);
    let refused = if preview { 561_103 } else { REFUSED };

    let before = findings().len();
    let (status, message) = raw_call(&call, target);
    let named = message.contains(&format!("{rule}: "));
    assert_eq!(named, dies, "{context}: {message}");
    assert_eq!(found(before, rule), usize::from(dies), "{context}");
    if dies {
        let strict = if crash.survivor == 0 { INNER } else { refused };
        assert_eq!(status, strict, "{context}: {message}");
        let safe = safe_layer(stream, &call, true).unwrap();
        let Err(Error::Violation(violation)) = safe else {
            panic!("{context}: with every lint allowed: {safe:?}");
        };
        assert_eq!(violation.rule.id, rule);
    }

    let _compat = check_scope(Check::Compat);
    let before = findings().len();
    let (status, message) = raw_call(&call, target);
    assert_eq!(found(before, rule), usize::from(dies), "{context}");
    if dies {
        let survivor = if crash.survivor == REFUSED { refused } else { crash.survivor };
        assert_eq!(status, survivor, "{context}: {message}");
    }
}

/// The status and message of phase one, and what it prepares computed.
fn raw_call(call: &Call, target: Target) -> (i32, String) {
    let mut call = call.clone();
    call.target = target;
    let described = call.describe();
    let version = Version::oldest_for(&described);
    let memory = upload(&call, None).unwrap();
    let prepared = raw::prepare(&call, version, &memory);
    if prepared.status != 0 {
        return (prepared.status, raw::message());
    }
    assert_eq!(prepared.run(std::ptr::null_mut()), (0, 0), "{}", raw::message());
    (0, String::new())
}
