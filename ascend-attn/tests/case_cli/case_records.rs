//! Live calls become cases, which the program replays.

use std::fs;
use std::path::Path;

use ascend_attention::attention::{BlockTable, Inputs};
use ascend_attention::case::{
    AttentionCase, Case, Expect, MaskSource, Parameter, ParameterCase, RECORD_VARIABLE, Recorded, Tolerance, Verdict,
    record_calls,
};
use ascend_attention::prompt::PromptFlashAttention;
use ascend_attention::spec::declared::DeclaredOperator;
use ascend_attention::spec::ops::fused_infer_attention_score::Version;
use ascend_attention::spec::{Cann, Soc};
use ascend_attention::{
    CausalOrigin, Error, FusedInferAttention, Layout, Machine, Mask, Output, Plan, Result, Runtime, Stream, Tensor,
    bf16, f16,
};
use ascend_emu::{Site, inject};
use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, Backend, Backends, BatchRequest, BatchSettings, Causality,
};

use crate::harness::{self, halves};
use crate::{emulated, last_line, program, text};

/// Within the tolerance of equal numbers.
const EQUAL: Tolerance = Tolerance { atol: 0.0, rtol: 0.0 };

/// A decode over a cache of 12 blocks of 16 tokens, of which four are read.
struct Paged {
    query: Tensor<f16>,
    key: Tensor<f16>,
    value: Tensor<f16>,
    table: BlockTable,
}

impl Paged {
    fn new(stream: &Stream) -> Self {
        let cache = |seed| stream.upload(&halves(seed, 12 * 16 * 128), [12, 16, 128]).unwrap();
        Self {
            query: stream.upload(&halves(1, 3 * 256), [3, 1, 256]).unwrap(),
            key: cache(2),
            value: cache(3),
            // The second block of the last row is beyond its keys.
            table: BlockTable::from_rows(stream, &[vec![7, 2], vec![9, 7], vec![4, 11]], 16).unwrap(),
        }
    }

    fn inputs(&self) -> Inputs<'_, f16> {
        Inputs::new(&self.query, &self.key, &self.value).paged(&self.table)
    }

    fn call(lengths: [usize; 3]) -> FusedInferAttention {
        FusedInferAttention::new(Layout::Bsh)
            .heads(4)
            .kv_heads(2)
            .scale(0.125)
            .actual_seq_lengths_kv(lengths)
            .softmax_lse(true)
    }

    fn plan(&self) -> Plan {
        Self::call([20, 32, 5]).plan(self.inputs()).unwrap()
    }
}

/// What the program says of a folder of cases.
fn replayed(folder: &Path) -> (Option<i32>, String) {
    let output = emulated(&[folder.to_str().unwrap()]);
    assert!(output.stderr.is_empty(), "{}", text(&output.stderr));
    (output.status.code(), text(&output.stdout).to_owned())
}

#[test]
fn a_live_paged_call_is_recorded_with_the_blocks_it_reads_and_replays_to_the_same_numbers() {
    let stream = harness::stream();
    let paged = Paged::new(&stream);
    let plan = paged.plan();
    let output: Output<f16> = plan.launch(&stream, paged.inputs()).unwrap();
    let case = AttentionCase::record(&stream, &plan, paged.inputs()).unwrap();
    assert_eq!(
        (case.arguments.key[0].shape(), case.arguments.value[0].shape()),
        (&[4, 16, 128][..], &[4, 16, 128][..])
    );
    let table = case.tensor(Parameter::BlockTable).unwrap().bytes();
    let (table, _) = table.as_chunks::<4>();
    let table: Vec<i32> = table.iter().map(|&entry| i32::from_le_bytes(entry)).collect();
    assert_eq!(table, [0, 1, 2, 0, 3, 0]);
    assert_eq!(case.expected, []);
    assert_eq!(case.launch(&stream).unwrap().verdict, Verdict::Computed);

    let case = case.expecting(&stream, &output, EQUAL).unwrap();
    let outcome = case.launch(&stream).unwrap();
    assert_eq!(outcome.verdict, Verdict::Passed, "{outcome:?}");
    assert_eq!(outcome.comparisons.len(), 2);
    let folder = tempfile::tempdir().unwrap();
    for number in 1..=3 {
        let written = Recorded::Case(Box::new(case.clone().into())).write_into(folder.path()).unwrap();
        assert!(written.ends_with(format!("call-00{number}.safetensors")), "{}", written.display());
    }
    let (code, said) = replayed(folder.path());
    assert_eq!(code, Some(0), "{said}");
    assert!(said.ends_with("3 passed, 0 failed\n"), "{said}");
}

#[test]
fn the_mask_of_a_plan_is_recorded_as_the_one_that_a_reader_makes() {
    let stream = harness::stream();
    let sample = harness::Sample::new(4);
    let [query, key, value] = sample.upload(&stream);
    let plan = harness::Sample::attention(stream.device()).plan((&query, &key, &value)).unwrap();
    let case = AttentionCase::record(&stream, &plan, Inputs::new(&query, &key, &value)).unwrap();
    assert_eq!(case.mask, MaskSource::Compressed);
    let masks = stream.device().masks();
    let dense = masks.causal_matrix(CausalOrigin::LeftUp, 96, 96, ascend_attention::mask::MaskForm::INT8);
    let plan = harness::Sample::attention(stream.device())
        .mask(ascend_attention::Mask::default_mask(
            dense.unwrap(),
            ascend_attention::Mask::ALL_TOKENS,
            ascend_attention::Mask::ALL_TOKENS,
        ))
        .plan((&query, &key, &value))
        .unwrap();
    let output = plan.launch(&stream, (&query, &key, &value)).unwrap();
    let case = AttentionCase::record(&stream, &plan, Inputs::new(&query, &key, &value)).unwrap();
    assert_eq!(case.mask, MaskSource::Tensor);
    let case = case.expecting(&stream, &output, EQUAL).unwrap();
    assert_eq!(case.launch(&stream).unwrap().verdict, Verdict::Passed);
}

/// There the mask that a reader makes is BOOL.
#[test]
fn the_mask_of_a_plan_on_ascend_950_is_recorded_by_its_name_too() {
    let machine = Machine::new(Soc::Ascend950, Cann::V9_1);
    let device = Runtime::emulated_as(&machine).unwrap().device(0).unwrap();
    let stream = device.stream().unwrap();
    let sample = harness::Sample::new(4);
    let [query, key, value] = sample.upload(&stream);
    let plan = harness::Sample::attention(&device).plan((&query, &key, &value)).unwrap();
    let output = plan.launch(&stream, (&query, &key, &value)).unwrap();
    let case = AttentionCase::record(&stream, &plan, Inputs::new(&query, &key, &value)).unwrap();
    assert_eq!(case.mask, MaskSource::Compressed);
    assert_eq!(case.tensor(Parameter::AttenMask), None);
    let case = case.expecting(&stream, &output, EQUAL).unwrap();
    let again = Case::from_bytes(&case.to_bytes().unwrap()).unwrap();
    assert_eq!(again.launch(&stream).unwrap().verdict, Verdict::Passed);
}

/// One decode step of an engine over blocks of 128 tokens: its layers' errors or outputs.
fn step(stream: &Stream, head_dim: usize, backends: Backends<bf16>) -> Vec<ascend_serving::Result<Tensor<bf16>>> {
    let pad = PadPolicy::SkipNegative;
    let shape = CacheShape::new(2, 2, head_dim);
    let cache = PagedKvCache::<bf16>::new(stream.device(), 8, 128, shape, pad).unwrap();
    let pool = cache.pool().clone();
    let mut sequence = Sequence::new(&pool);
    let _ = sequence.grow(131).unwrap();
    cache.mark_computed(&sequence, 130).unwrap();
    let batch = [BatchRequest::of(&sequence, 1)];
    let settings = BatchSettings::of(&cache, Causality::Causal);
    let metadata = AttentionMetadata::new(&batch, settings).unwrap();
    let mut engine = Attention::new(AttentionShape::new(4, 2, head_dim), cache, backends);
    let rows = |heads: usize| {
        let data = halves(heads as u64, heads * head_dim);
        let data: Vec<_> = data.iter().map(|&x| bf16::from_f32(f32::from(x))).collect();
        stream.upload(&data, [1, heads, head_dim]).unwrap()
    };
    let [query, key, value] = [rows(4), rows(2), rows(2)];
    let mut step = engine.begin(stream, &metadata).unwrap();
    let layers = (0..2).map(|layer| step.forward(layer, (&query, &key, &value)).cloned());
    layers.collect()
}

/// The cases of FusedInferAttentionScore among the calls; there are `count` of them.
fn attention_of(calls: &[Recorded], count: usize) -> Vec<&Case> {
    let cases = calls.iter().filter_map(Recorded::case);
    let operator = DeclaredOperator::FusedInferAttentionScore;
    let cases: Vec<_> = cases.filter(|case| case.operator() == operator).collect();
    assert_eq!(cases.len(), count, "{calls:?}");
    cases
}

#[test]
fn the_calls_of_an_engines_step_are_recorded_as_they_are_launched() {
    let Some(stream) = harness::stream_of(Cann::V8_1) else {
        return;
    };
    let backends = || Backends::none().with(Backend::PagedDecode).with(Backend::Fused);
    let (outputs, calls) = record_calls(EQUAL, || step(&stream, 64, backends()));
    assert!(outputs.iter().all(|output| output.is_ok()));
    // New keys and values go into the cache before each layer's attention.
    assert_eq!(calls.len(), 4, "{calls:?}");
    let folder = tempfile::tempdir().unwrap();
    for call in &calls {
        call.write_into(folder.path()).unwrap();
    }
    for case in attention_of(&calls, 2) {
        assert_eq!(case.arguments.tensors("key")[0].shape()[0], 2, "two of eight blocks");
        assert_eq!(case.expected.len(), 1);
    }
    let (code, said) = replayed(folder.path());
    assert_eq!(code, Some(0), "{said}");
    assert!(said.ends_with("4 passed, 0 failed\n"), "{said}");

    // What one backend refuses and the next serves is no failure; what none serves is.
    let (outputs, calls) =
        record_calls(EQUAL, || step(&stream, 48, Backends::none().with(Backend::Fused).with(Backend::PagedDecode)));
    assert!(outputs.iter().all(|output| output.is_ok()));
    let cases = attention_of(&calls, 2);
    assert!(cases.iter().all(|case| case.expect == Expect::Ok));
    let (outputs, calls) = record_calls(EQUAL, || step(&stream, 48, Backends::none().with(Backend::Fused)));
    assert!(outputs.iter().all(|output| matches!(output, Err(ascend_serving::Error::NoBackend { .. }))), "{outputs:?}");
    for case in attention_of(&calls, 2) {
        assert!(matches!(case.expect, Expect::Reject { .. }), "{case:?}");
        assert_eq!(case.launch(&stream).unwrap().verdict, Verdict::Passed);
    }
    // Nothing is recorded any more.
    let ((), calls) = record_calls(EQUAL, || ());
    assert!(calls.is_empty());
}

#[test]
fn what_no_case_file_can_hold_is_recorded_by_its_shapes() {
    let Some(stream) = harness::stream_of(Cann::V8_1) else {
        return;
    };
    let wide = stream.upload(&halves(1, 2 * 8 * 2 * 64), [1, 2, 8, 128]).unwrap();
    let strided = wide.narrow(3, 0..64).unwrap();
    let call = FusedInferAttention::new(Layout::Bnsd).scale(1.0).heads(2);
    let (planned, calls) = record_calls(EQUAL, || call.plan((&strided, &strided, &strided)));
    let Err(Error::Violation(violation)) = planned else {
        panic!("{planned:?}");
    };
    let [Recorded::Parameters { call, why }] = &calls[..] else {
        panic!("{calls:?}");
    };
    assert!(why.contains("not packed"), "{why}");
    let line = call.to_json().unwrap();
    assert_eq!(&ParameterCase::from_json(&line).unwrap(), &**call);
    let target = stream.device().target().unwrap();
    assert_eq!((call.soc, call.release), (Some(target.soc), Some(target.cann)));
    let folder = tempfile::tempdir().unwrap();
    calls[0].write_into(folder.path()).unwrap();
    let output = program().arg("check").arg(folder.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    let said = text(&output.stdout);
    // The operator takes the call: a lint stopped it.
    assert!(said.contains("accept, nothing expected; lints: "), "{said}");
    assert!(said.contains(violation.rule.id), "{said}");
}

/// The failing calls of a process that has the variable.
fn failing_calls() {
    let Some(stream) = harness::stream_of(Cann::V8_1) else {
        return;
    };
    // Served by the second backend: nothing to report.
    let _ = step(&stream, 48, Backends::none().with(Backend::Fused).with(Backend::PagedDecode));
    for _ in 0..2 {
        let outputs = step(&stream, 48, Backends::none().with(Backend::Fused));
        assert!(outputs.iter().all(Result::is_err), "{outputs:?}");
    }
    let paged = Paged::new(&stream);
    let plan = paged.plan();
    let [key, value] = [&paged.key, &paged.value].map(|cache| cache.narrow(0, 0..11).unwrap());
    let inputs = Inputs::new(&paged.query, &key, &value).paged(&paged.table);
    let error = plan.launch(&stream, inputs).unwrap_err();
    assert!(matches!(&error, Error::Violation(violation) if violation.rule.id == "plan.tensors"), "{error}");
    let refused = inject(Site::Launch, 1, 361_001);
    plan.launch(&stream, paged.inputs()).unwrap_err();
    drop(refused);
    // Over before the fault: not reported with it.
    let _: Output<f16> = plan.launch(&stream, paged.inputs()).unwrap();
    stream.synchronize().unwrap();
    // Of another operator.
    let row = stream.upload(&halves(1, 64), [1, 1, 1, 64]).unwrap();
    let prompt = PromptFlashAttention::new(Layout::Bnsd).heads(3).scale(1.0);
    prompt.plan((&row, &row, &row)).unwrap_err();
    let fault = inject(Site::Launch, 1, 507_015);
    let _: Output<f16> = plan.launch(&stream, paged.inputs()).unwrap();
    drop(fault);
    stream.synchronize().unwrap_err();
}

#[test]
fn refused_and_failing_calls_are_written_into_the_folder_of_the_variable() {
    if harness::not_on_npu("a fault is injected into the emulation of the program's own") {
        return;
    }
    if std::env::var_os(RECORD_VARIABLE).is_some() {
        return failing_calls();
    }
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("new/reports");
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "case_records::refused_and_failing_calls_are_written_into_the_folder_of_the_variable"])
        .env(RECORD_VARIABLE, &folder)
        .output()
        .unwrap();
    assert!(child.status.success(), "{}", text(&child.stdout));
    assert!(text(&child.stdout).contains("1 passed"), "{}", text(&child.stdout));
    let mut names: Vec<_> =
        fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    let want = [
        "call-001.safetensors",
        "call-002.safetensors",
        "call-003.safetensors",
        "call-004.safetensors",
        "call-005.jsonl",
    ];
    assert_eq!(names, want);

    let refused = Case::read(folder.join("call-001.safetensors")).unwrap();
    assert!(matches!(refused.expect, Expect::Reject { .. }));
    let rule = &refused.name;
    let (code, said) = replayed(&folder);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains(&format!("refused as expected: {rule}: ")), "{said}");
    // The other two are right as calls: what went wrong is in their notes.
    assert!(said.ends_with("2 passed, 0 failed, 2 computed\n"), "{said}");
    let prompt = Case::read(folder.join("call-004.safetensors")).unwrap();
    assert_eq!(prompt.name, "prompt.prefill_rules");
    let note = |name: &str| Case::read(folder.join(name)).unwrap().note;
    assert!(note("call-002.safetensors").contains("key"), "{}", note("call-002.safetensors"));
    assert!(note("call-003.safetensors").contains("361001"), "{}", note("call-003.safetensors"));

    let output = program().arg("check").arg(&folder).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stdout));
    let said = text(&output.stdout);
    let first = said.lines().next().unwrap();
    assert!(first.starts_with("call-001 ") && first.contains("reject, as expected"), "{first}");
    assert!(first.contains(rule.as_str()), "{first}");
    // Of the call that was queued when the stream failed nothing is expected.
    assert_eq!(last_line(&output), "4 passed, 0 failed, 1 without expectation");
    let faulty = fs::read_to_string(folder.join("call-005.jsonl")).unwrap();
    let faulty = ParameterCase::from_json(faulty.trim()).unwrap();
    assert!(
        faulty.about.starts_with("one of 1 calls that were queued when the stream failed")
            && faulty.about.contains("507015"),
        "{}",
        faulty.about
    );
}

#[test]
fn a_full_folder_takes_no_more_and_loses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let call = r#"{"id": "one", "inputs": {}, "attrs": {}, "outputs": {}}"#;
    let call = Recorded::Parameters { call: Box::new(ParameterCase::from_json(call).unwrap()), why: String::new() };
    fs::write(folder.path().join("call-002.safetensors"), "another").unwrap();
    for _ in 0..255 {
        call.write_into(folder.path()).unwrap();
    }
    let full = call.write_into(folder.path()).unwrap_err().to_string();
    assert!(full.contains("there are 256 recorded calls") && full.contains("move them"), "{full}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 256);
    assert_eq!(fs::read(folder.path().join("call-002.safetensors")).unwrap(), b"another");
}

/// A replay elsewhere asks the same operator, and is refused for the same reason.
#[test]
fn a_recorded_call_keeps_its_target_its_version_and_its_rule() {
    let stream = harness::stream();
    let paged = Paged::new(&stream);
    let plan = paged.plan();
    let case = AttentionCase::record(&stream, &plan, paged.inputs()).unwrap();
    let device = stream.device();
    assert_eq!(case.soc_name.as_deref(), Some(device.soc_name()));
    assert_eq!(case.cann, Some(device.target().unwrap().cann));
    let called = Version::of_function(plan.operator()).map(Version::number);
    assert_eq!(case.op_version, called);

    let query = stream.upload(&halves(1, 2 * 2 * 96), [2, 2, 1, 96]).unwrap();
    let kv = stream.upload(&halves(2, 2 * 2 * 64 * 96), [2, 2, 64, 96]).unwrap();
    // 9.0 alone asks for a mask of all rows of the key.
    let hidden = stream.upload(&[false; 2 * 50], [2, 1, 50]).unwrap();
    let call = FusedInferAttention::new(Layout::Bnsd).scale(1.0).heads(2).actual_seq_lengths_kv([40, 50]);
    let rejected = call.clone().heads(3);
    let portable = call.mask(Mask::all_mask(hidden)).portable_since(Cann::V8_5);
    for (call, rejects) in [(rejected, true), (portable, false)] {
        let (planned, calls) = record_calls(EQUAL, || call.plan((&query, &kv, &kv)));
        let Err(Error::Violation(violation)) = planned else {
            panic!("{planned:?}");
        };
        let case = calls[0].case().unwrap();
        assert_eq!(case.expect_rule.as_deref(), Some(violation.rule.id));
        assert_eq!(case.expect != Expect::Ok, rejects, "{case:?}");
        assert_eq!(case.portable_since, (!rejects).then_some(Cann::V8_5));
        let folder = tempfile::tempdir().unwrap();
        let file = calls[0].write_into(folder.path()).unwrap();
        let mut read = Case::read(&file).unwrap();
        assert_eq!(&read, case);
        assert_eq!(read.launch(&stream).unwrap().verdict, Verdict::Passed);
        let output = program().arg("check").arg(&file).output().unwrap();
        let said = text(&output.stdout);
        assert_eq!(output.status.code(), Some(0), "{said}");
        assert!(said.contains(violation.rule.id), "{said}");
        read.expect_rule = Some("tokens.without_mask".to_owned());
        let verdict = read.launch(&stream).unwrap().verdict;
        assert!(matches!(verdict, Verdict::Failed { .. }), "{verdict:?}");
    }
}

#[test]
fn of_an_output_with_nan_nothing_is_expected_and_the_note_says_so() {
    let stream = harness::stream();
    let nan = stream.upload(&[f16::NAN; 64], [1, 1, 2, 32]).unwrap();
    let call = FusedInferAttention::new(Layout::Bnsd).heads(1).scale(0.125);
    let plan = call.plan((&nan, &nan, &nan)).unwrap();
    let (output, calls) = record_calls(EQUAL, || plan.launch(&stream, (&nan, &nan, &nan)));
    let case = calls[0].case().unwrap().clone().attention().unwrap();
    assert_eq!(case.expected, []);
    assert!(case.note.contains("64 NaN in attention_out"), "{}", case.note);
    let refused = case.clone().expecting(&stream, &output.unwrap(), EQUAL);
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("64 NaN"), "{text}");
}
