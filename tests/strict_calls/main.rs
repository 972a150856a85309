//! Random calls of every path through the C ABI, in strict emulation: what the contract accepts is computed right and
//! touches nothing else; what it refuses is refused with its status, and leaves nothing behind.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::expect_used,
    unreachable_pub,
    reason = "a test fails by panicking"
)]

mod breaking;
mod crashes;
mod entry_points;
mod raw;
mod recorded;
mod unchecked;

use ascend_testing::calls;

use std::cell::Cell;
use std::sync::{Mutex, PoisonError};

use ascend_attention::attention::Arguments;
use ascend_attention::spec::attention_problem::{AttentionProblem, Work};
use ascend_attention::spec::ops::fused_infer_attention_score::{
    Argument, Cache, CheckedCall, Parameter, Version, rules,
};
use ascend_attention::spec::{Cann, DType, Extents, Format, Layout, Level, Soc, Target, TensorDesc};
use ascend_attention::{Error, Machine, Runtime, Stream};
use ascend_emu::kernel::reference::{Inputs, attention};
use calls::compare::Written;
use calls::contents::arguments_of;
use calls::{Call, Random, ascend950, dense, paths, quantised, releases};
use proptest::prelude::*;
use proptest::test_runner::Config;
use raw::{Guarded, Memory, Prepared, UNSET};

type Failure = Result<(), TestCaseError>;

/// How often each end was reached: a property that holds because nothing gets there shows.
#[derive(Default)]
struct Ends {
    computed: Cell<usize>,
    linted: Cell<usize>,
    refused: Cell<usize>,
    unsupported: Cell<usize>,
    safe: Cell<usize>,
}

/// Live handles and findings are counted in the whole process: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn count(cell: &Cell<usize>) {
    cell.set(cell.get() + 1);
}

fn call(seed: u64) -> Call {
    let kinds = [
        dense::dense,
        paths::packed,
        paths::paged,
        paths::latent,
        paths::biased,
        quantised::antiquant,
        quantised::nz,
        quantised::quantised,
    ];
    let mut random = Random(seed ^ 0x5851_f42d);
    match random.below(10) {
        kind @ 0..8 => kinds[kind](seed),
        _ => dense::dense(seed),
    }
}

/// Allocates and fills every tensor of a call; `None` if one is no tensor that memory could hold.
fn upload(call: &Call, checked: Option<&CheckedCall<'_>>) -> Option<Memory> {
    let mut random = Random(call.seed);
    let described = call.describe();
    let mut memory = Memory::new();
    for argument in arguments_of(&described) {
        let desc = described.tensor(argument)?;
        let bytes = raw::reach(desc)?;
        let output = matches!(argument.parameter, Parameter::AttentionOut | Parameter::SoftmaxLse);
        let mut contents = match output {
            true => vec![0xff; bytes],
            // A changed call may look up any entry: let it name a block.
            false if argument.parameter == Parameter::BlockTable && checked.is_none() => Vec::new(),
            // A type of half bytes, or of none: any bytes will do.
            false if !matches!(desc.dtype.bits(), 4 | 8..) => Vec::new(),
            false => call.contents(argument, desc, &mut random),
        };
        contents.resize(bytes, 0);
        if let Some(checked) = checked {
            call.poison(checked, argument, &mut contents);
        }
        memory.insert(argument, Guarded::new(contents, if output { 0xa5 } else { 0xff }));
    }
    Some(memory)
}

/// What the safe layer says of the call: whether it plans it, with every lint allowed or with none.
fn safe_layer(stream: &Stream, call: &Call, lints: bool) -> Option<Result<(), Error>> {
    let described = call.describe();
    let mut arguments = Arguments::new(described.attributes());
    for argument in arguments_of(&described) {
        let desc = described.tensor(argument)?;
        // The safe layer has no tensors with gaps, of other formats, or of halves of bytes.
        if !desc.is_contiguous() || desc.format != Format::Nd || desc.dtype.size().is_none() {
            return None;
        }
        let bytes = raw::reach(desc)?;
        let shape: Vec<usize> = desc.shape.iter().map(|&dim| dim as usize).collect();
        let tensor = stream.upload_bytes(desc.dtype, &vec![0; bytes], shape).unwrap();
        arguments.set(argument.parameter, tensor);
    }
    if lints {
        // Nothing allows a call that ends the host process.
        for lint in rules::lints::all().filter(|lint| lint.level == Level::Lint) {
            // SAFETY: the call is planned and never launched.
            unsafe { arguments.allow_overrun(lint.id) };
        }
    }
    // What is not given, the safe layer makes itself.
    if described.attention_out.is_none() || described.softmax_lse_flag && described.softmax_lse.is_none() {
        return None;
    }
    Some(arguments.plan(stream.device()).map(drop))
}

/// What is known of a call.
#[derive(Clone, Copy, PartialEq)]
enum Made {
    /// It is accepted, and holds to the documents.
    Clean,
    /// It is accepted, and stays within its tensors.
    Taken,
    /// Nothing.
    Anyhow,
}

/// The whole of one call.
fn check(stream: &Stream, call: &Call, made: Made, ends: &Ends) -> Failure {
    let right = made != Made::Anyhow;
    let described = call.describe();
    let version = match call.target.soc {
        Soc::Ascend950 => Version::V5,
        _ => Version::chosen_on(&described, Version::V1, call.target),
    };
    let live = ascend_emu::live();
    let findings = ascend_emu::findings().len();
    let verdict = described.check(version, call.target);
    let Some(memory) = upload(call, verdict.as_ref().ok().filter(|_| right)) else {
        prop_assert!(!right);
        return Ok(());
    };
    let prepared = raw::prepare(call, version, &memory);
    let status = prepared.status;
    match &verdict {
        Ok(checked) => {
            prop_assert_eq!(status, 0, "the emulation refuses what the contract takes: {}", raw::message());
            let (mut lints, mut bad) = (Vec::new(), Vec::new());
            checked.each_lint(&mut |lint| {
                lints.push(lint.rule.id);
                // Views with gaps are the one thing that a clean call has and the documents do not allow.
                let fine = match made {
                    Made::Clean => lint.rule.id == "tensor.strided",
                    Made::Taken => !lint.rule.overruns,
                    Made::Anyhow => true,
                };
                bad.extend((!fine).then_some(lint.rule.id));
            });
            prop_assert!(bad.is_empty(), "{:?}", bad);
            accepted(stream, &checked.problem, &memory, prepared, lints.is_empty() || right, findings)?;
            count(if lints.is_empty() { &ends.computed } else { &ends.linted });
            if let Some(plan) = safe_layer(stream, call, true) {
                prop_assert!(plan.is_ok(), "the safe layer refuses what the contract takes: {:?}", plan);
                count(&ends.safe);
                let strict = safe_layer(stream, call, false).unwrap();
                match strict {
                    Ok(()) => prop_assert!(lints.is_empty(), "{:?}", lints),
                    Err(Error::Violation(violation)) => {
                        prop_assert!(lints.contains(&violation.rule.id))
                    }
                    Err(error) => prop_assert!(false, "{}", error),
                }
            }
        }
        Err(refusal) => {
            prop_assert!(!right, "{}", refusal);
            prop_assert_eq!(status, refusal.status(), "{} but {}", refusal, raw::message());
            prop_assert_eq!(prepared.workspace_bytes, UNSET);
            prop_assert!(!raw::message().is_empty());
            match safe_layer(stream, call, true) {
                None => {}
                Some(Ok(())) => prop_assert!(false, "the safe layer takes what the contract refuses: {}", refusal),
                Some(Err(error)) => {
                    count(&ends.safe);
                    match &error {
                        Error::Violation(got) if refusal.is_unsupported() => {
                            prop_assert_eq!(got, refusal)
                        }
                        Error::Violation(got) => {
                            prop_assert_eq!(got.rule.id, refusal.rule.id);
                            prop_assert!(rules::all().any(|rule| rule.id == got.rule.id));
                        }
                        _ => prop_assert!(false, "{} instead of {}", error, refusal),
                    }
                }
            }
            count(if refusal.is_unsupported() { &ends.unsupported } else { &ends.refused });
            raw::ok(unsafe_sync(stream));
            prop_assert!(memory.values().all(Guarded::is_untouched), "a refused call wrote");
        }
    }
    drop(memory);
    stream.synchronize().unwrap();
    prop_assert_eq!(ascend_emu::live(), live);
    Ok(())
}

/// Runs an accepted call. `clean` calls show no misuse and compute what the definition says.
fn accepted(
    stream: &Stream,
    problem: &AttentionProblem<'_>,
    memory: &Memory,
    prepared: Prepared,
    clean: bool,
    findings: usize,
) -> Failure {
    let want = clean.then(|| {
        let bytes = |role| {
            let tensor = Argument::of_role(role).and_then(|of| memory.get(&of));
            tensor.map_or(&[][..], Guarded::contents)
        };
        attention(problem, &Inputs { dtype: problem.dtype(), bytes: &bytes, geometry: None })
    });
    let statuses = prepared.run(stream.as_raw());
    let found = ascend_emu::findings();
    if clean {
        prop_assert_eq!(statuses, (0, 0), "{}", raw::message());
        prop_assert_eq!(&found[findings..], &[][..]);
    }
    for (argument, tensor) in memory {
        match argument.parameter {
            Parameter::AttentionOut | Parameter::SoftmaxLse => {
                // With a lint the operator writes what it takes the output for.
                prop_assert!(tensor.written().is_some() || !clean, "bytes around {:?} changed", argument);
            }
            _ => prop_assert!(tensor.is_untouched(), "{:?} changed", argument),
        }
    }
    let Some(want) = want else { return Ok(()) };
    if problem.work == Work::Nothing {
        return Ok(());
    }
    let bytes = |parameter: Parameter| memory.get(&parameter.into()).and_then(Guarded::written).unwrap_or_default();
    let (out, lse) = (bytes(Parameter::AttentionOut), bytes(Parameter::SoftmaxLse));
    let written = Written { dtype: problem.dtype(), attention_out: &out, softmax_lse: &lse };
    written.compare(problem, &want.attention, &want.lse).map_err(TestCaseError::fail)
}

fn unsafe_sync(stream: &Stream) -> i32 {
    // SAFETY: the stream is alive.
    unsafe { ascend_emu::abi::aclrtSynchronizeStream(stream.as_raw()) }
}

/// A call takes a while: half as many as `PROPTEST_CASES` says.
fn config() -> Config {
    let default = Config::default();
    Config { cases: (default.cases / 2).max(1), failure_persistence: None, max_shrink_iters: 0, ..default }
}

/// The stream of a test in strict mode, while no other test runs.
fn strictly(test: impl FnOnce(&Stream, &Ends)) {
    strictly_on(Target::snapshot(Soc::AtlasA2), test);
}

/// Runs a test in strict mode on an emulated machine of this product and release, while no other test runs.
fn strictly_on(target: Target, test: impl FnOnce(&Stream, &Ends)) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let _strict = ascend_emu::check_scope(ascend_emu::Check::Strict);
    let machine = Machine::new(target.soc, target.cann).operator(Version::V5);
    let device = Runtime::emulated_as(&machine).unwrap().device(0).unwrap();
    test(&device.stream().unwrap(), &Ends::default());
}

/// The first call of those from this seed on that breaks no lint.
fn clean(draw: fn(u64) -> Call, seed: u64) -> Call {
    let calls = (0..1000).map(|more| draw(seed.wrapping_add(more)));
    let is_clean = |call: &Call| {
        let described = call.describe();
        let checked = described.check(Version::V5, call.target);
        checked.is_ok_and(|checked| checked.lint(&[]).is_ok())
    };
    let mut calls = calls.filter(is_clean);
    calls.next().unwrap()
}

#[test]
fn calls_that_ascend_950_accepts_are_computed() {
    let target = Target::new(Soc::Ascend950, Cann::V9_1);
    strictly_on(target, |stream, ends| {
        proptest!(config(), |(seed: u64)| {
            let call = clean(ascend950::any, seed);
            check(stream, &call, Made::Clean, ends).map_err(|error| context(error, &call, ""))?;
        });
        assert!(ends.computed.get() >= config().cases as usize);
    });
}

#[test]
fn calls_that_the_contract_accepts_are_computed() {
    strictly(|stream, ends| {
        proptest!(config(), |(seed: u64)| {
            let call = call(seed);
            check(stream, &call, Made::Clean, ends).map_err(|error| context(error, &call, ""))?;
        });
        let (computed, strided) = (ends.computed.get(), ends.linted.get());
        println!("{computed} computed, {strided} more with strided tensors");
        assert!(computed + strided >= config().cases as usize);
    });
}

#[test]
fn calls_that_each_release_accepts_are_computed() {
    let cases = config().cases / 8 + 1;
    let config = || Config { cases, ..config() };
    for cann in Cann::ALL {
        let target = Target::new(Soc::AtlasA2, cann);
        let new = Cell::new(0);
        strictly_on(target, |stream, ends| {
            proptest!(config(), |(seed: u64)| {
                let call = releases::accepted(seed, target);
                new.set(new.get() + u32::from(releases::is_new(&call)));
                check(stream, &call, Made::Taken, ends).map_err(|error| context(error, &call, ""))?;
            });
        });
        println!("{cann}: {cases} computed, of which the snapshot refuses {}", new.get());
        let least = if cann > Cann::V8_1 { cases / 3 } else { 0 };
        assert!(new.get() >= least);
    }
}

#[test]
fn calls_over_caches_whose_blocks_lie_apart_are_computed() {
    let cases = config().cases / 4 + 1;
    for soc in [Soc::AtlasA2, Soc::Ascend950] {
        let target = Target::new(soc, Cann::V9_2);
        strictly_on(target, |stream, ends| {
            proptest!(Config { cases, ..config() }, |(seed: u64)| {
                let call = releases::blocks_apart(seed, target);
                check(stream, &call, Made::Taken, ends).map_err(|error| context(error, &call, ""))?;
            });
        });
    }
}

/// A launch that reads a mask beyond what is allocated.
fn reads_beyond(stream: &Stream, call: &Call) {
    let described = call.describe();
    let checked = described.check(call.version, call.target).unwrap();
    let mut overruns = false;
    checked.each_lint(&mut |lint| overruns |= lint.rule.overruns);
    assert!(overruns, "{call:?}");
    let memory = upload(call, None).unwrap();
    let prepared = raw::prepare(call, call.version, &memory);
    assert_eq!(prepared.status, 0, "{}", raw::message());
    let (launched, ended) = prepared.run(stream.as_raw());
    assert!(launched != 0 || ended != 0, "nobody noticed: {call:?}");
    for parameter in [Parameter::AttentionOut, Parameter::Query] {
        assert!(memory[&parameter.into()].is_untouched(), "{parameter}");
    }
}

#[test]
fn masks_whose_size_nobody_checks_are_not_read_beyond_their_memory() {
    let target = Target::new(Soc::AtlasA2, Cann::V9_1);
    strictly_on(target, |stream, _| {
        let shrink = |call: &mut Call, shape: &[i64]| {
            call.plain.atten_mask = Some(calls::desc(DType::Bool, shape));
            call.contents.retain(|(of, _)| of.parameter != Parameter::AttenMask);
        };
        let large = |call: &Call, least: i64| {
            let query = call.plain.query.unwrap().shape;
            call.plain.query_rope.is_some() && query[call.layout.input().row_axis()] >= least
        };
        let tree = |call: &Call, packed: bool| {
            let reads = call.describe().check(call.version, target).unwrap().problem.mask_bytes();
            call.plain.sparse_mode == 9
                && call.layout.is_packed() == packed
                && reads.is_some_and(|bytes| bytes.end > 400)
        };
        for packed in [false, true] {
            let all = (0..).map(|seed| releases::accepted(seed, target));
            let mut call = all.filter(|call| large(call, 9)).find(|call| tree(call, packed)).unwrap();
            shrink(&mut call, &[1]);
            reads_beyond(stream, &call);
        }
        // One row a sequence, a mask of two axes with one row: the second sequence has none.
        let of = |rows| Extents { batch: 9, heads: 1, rows, dim: 64 };
        let mut call = Call::new(Layout::Bnsd, DType::Float16, of(1), 3);
        (call.target, call.version) = (target, Version::V4);
        call.keys(DType::Float16, of(100), 64);
        shrink(&mut call, &[1, 100]);
        reads_beyond(stream, &call);
    });
}

#[test]
fn lengths_beyond_the_block_table_are_found() {
    let target = Target::new(Soc::AtlasA2, Cann::V9_1);
    strictly_on(target, |stream, _| {
        let of = Extents { batch: 1, heads: 4, rows: 2, dim: 80 };
        let mut call = Call::new(Layout::Tnd, DType::Float16, of, 5);
        (call.target, call.version) = (target, Version::V4);
        call.q_lens = Some(vec![1, 2]);
        call.pages(Cache::BnBsH, DType::Float16, [2, 16, 80, 80], &[20, 30], &mut Random(1));
        let columns = call.plain.block_table.unwrap().shape[1];
        call.kv_lens = Some(vec![20, columns * 16 + 1]);
        call.plain.inner_precise = 0;
        reads_beyond(stream, &call);
        let found = ascend_emu::findings();
        assert_eq!(found.last().unwrap().kind, ascend_emu::FindingKind::BlockTable);
    });
}

/// Gives each tensor the format that PyTorch's plugin gives a tensor of its number of axes.
fn described_by_torch(call: &mut Call) {
    for argument in arguments_of(&call.describe()) {
        let desc = breaking::of_mut(call, argument).unwrap();
        desc.format = match desc.shape.rank() {
            3 => Format::Ncl,
            4 => Format::Nchw,
            5 => Format::Ncdhw,
            _ => Format::Nd,
        };
    }
}

#[test]
fn calls_in_the_formats_of_pytorch_are_computed() {
    strictly(|stream, ends| {
        for seed in 0..16 {
            for kind in [dense::dense, paths::packed, paths::paged, paths::latent] {
                let mut call = kind(seed);
                described_by_torch(&mut call);
                check(stream, &call, Made::Clean, ends).unwrap();
            }
        }
        // Packed, BSH and a paged cache of three axes are among them.
        assert_eq!(ends.computed.get() + ends.linted.get(), 64);
    });
}

#[test]
fn calls_with_one_field_changed_are_answered_alike() {
    strictly(|stream, ends| {
        proptest!(config(), |(seed: u64, change: u64)| {
            let mut call = call(seed);
            let what = breaking::one_field(&mut call, &mut Random(change));
            check(stream, &call, Made::Anyhow, ends).map_err(|error| context(error, &call, &what))?;
        });
        let (refused, safe) = (ends.refused.get(), ends.safe.get());
        println!(
            "{refused} refused, {} not supported, {} accepted, {} with lints; {safe} asked of the safe layer too",
            ends.unsupported.get(),
            ends.computed.get(),
            ends.linted.get()
        );
        // Both verdicts are common, and most calls are ones that the safe layer can make.
        let cases = refused + ends.unsupported.get() + ends.computed.get() + ends.linted.get();
        assert!(cases < 100 || refused >= cases / 4 && refused <= cases * 9 / 10);
        assert!(cases < 100 || safe >= cases / 2);
    });
}

#[test]
fn calls_that_this_release_does_not_compute_are_refused_by_type() {
    strictly(|stream, ends| {
        // Scales of single tokens, and a shared prefix that has none.
        let by_token = |call: &Call| {
            let plain = &call.plain;
            plain.block_table.is_none() && plain.key_antiquant_scale.is_some() && plain.key_antiquant_mode == 1
        };
        let mut call = (0..).map(quantised::antiquant).find(by_token).unwrap();
        let prefix = TensorDesc::packed(call.key[0].dtype, call.key[0].shape.with(0, 1));
        call.plain.key_shared_prefix = Some(prefix);
        call.plain.value_shared_prefix = Some(prefix);
        check(stream, &call, Made::Anyhow, ends).unwrap();
        assert_eq!(ends.unsupported.get(), 1);
    });
}

fn context(error: TestCaseError, call: &Call, change: &str) -> TestCaseError {
    match error {
        TestCaseError::Fail(reason) => TestCaseError::fail(format!("{reason}\n{change}\n{call:?}")),
        reject => reject,
    }
}
