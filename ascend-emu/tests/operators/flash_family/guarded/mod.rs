//! Calls whose tensors all lie at pages without access: a launch that reads or writes a byte outside of its tensors
//! ends the process, and the call stands on standard error.

mod draws;
mod mutation;
mod pages;
mod placed;

pub(super) use ascend_testing::calls;
use ascend_testing::{alone::alone, lints};

use crate::bench::*;
use ascend_emu::abi::*;
use ascend_emu::{Machine, functions_of};
use ascend_spec::ops::fused_infer_attention_score::{self as fia, Version, rules};
use ascend_spec::{Cann, Soc, Target, TensorDesc};
use ascend_sys::bindings::aclrtStream;
use calls::Random;
use mutation::one_in;
use pages::{Edge, Pages};
use placed::Call;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Statuses of errors inside the emulator.
const INTERNAL: [i32; 3] = [500_000, 561_000, 507_000];
/// Bytes of workspace that every operator is content with.
const WORKSPACE: usize = 16 << 20;
/// Tensors of the largest call.
const REGIONS: usize = 40;

/// Where calls for one product and release are made.
struct Place {
    target: Target,
    bench: Bench,
    stream: aclrtStream,
    workspace: *mut c_void,
}

impl Place {
    fn new(target: Target) -> Self {
        init();
        let name = match target.soc {
            Soc::Ascend950 => "Ascend950",
            Soc::AtlasA3 => "Ascend910_93",
            _ => "Ascend910B",
        };
        let functions = functions_of(&Machine::new(name, target.cann).unwrap()).unwrap();
        let mut context = null_mut();
        ok(unsafe { functions.aclrtCreateContext.unwrap()(&mut context, 0) });
        Place { target, bench: Bench { context }, stream: stream(), workspace: malloc(WORKSPACE) }
    }

    fn end(self) {
        self.bench.enter();
        destroy(self.stream);
        free(self.workspace);
    }
}

/// One test at a time says which call runs.
static ALONE: Mutex<()> = Mutex::new(());

/// Makes calls, and counts those that were launched.
struct Caller {
    _alone: MutexGuard<'static, ()>,
    pages: Pages,
    places: Vec<Place>,
    text: String,
    launched: usize,
}

impl Caller {
    fn new() -> Self {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let first = Place::new(Target::new(Soc::AtlasA2, Cann::NEWEST));
        Caller { _alone, pages: Pages::new(REGIONS), places: vec![first], text: String::new(), launched: 0 }
    }

    /// Enters the place for a target, or for the newest release that knows its product.
    fn enter(&mut self, target: Target) -> usize {
        let target = Target::with_default(target.soc, target.cann);
        let known = self.places.iter().position(|place| place.target == target);
        let index = known.unwrap_or_else(|| {
            self.places.push(Place::new(target));
            self.places.len() - 1
        });
        self.places[index].bench.enter();
        index
    }

    /// Makes a call with every tensor at one edge of its memory, then at the other.
    fn make<C: Call>(&mut self, call: &C, version: u8, target: Target, contents: placed::Contents<'_>) {
        let place = self.enter(target);
        for edge in [Edge::Last, Edge::First] {
            let text = format!("{edge:?} V{version} {target} {call:?}");
            pages::running(&text);
            self.text = text;
            self.pages.rewind();
            let ((status, (bytes, executor)), two) = call.prepared(version, &mut |name, index, desc| {
                let (at, held) = self.pages.place(desc.byte_range(), edge);
                contents(name, index, desc, held);
                at.cast()
            });
            assert!(!INTERNAL.contains(&status), "{status}: {}\n{}", message(), self.text);
            if status != 0 {
                continue;
            }
            assert!(bytes as usize <= WORKSPACE);
            let Place { stream, workspace, .. } = self.places[place];
            let launched = unsafe { two(workspace, bytes, executor, stream) };
            if launched != 0 {
                ok(unsafe { aclDestroyAclOpExecutor(executor) });
                continue;
            }
            let synced = unsafe { aclrtSynchronizeStream(stream) };
            assert!(!INTERNAL.contains(&synced), "{synced}: {}\n{}", message(), self.text);
            self.launched += usize::from(synced == 0);
        }
    }

    /// Makes a call, and some that differ from it.
    fn make_changed<C: Call>(
        &mut self,
        (call, version, target): (&C, u8, Target),
        contents: placed::Contents<'_>,
        changes: usize,
        random: &mut Random,
    ) {
        self.make(call, version, target, contents);
        for _ in 0..changes {
            let mut changed = call.clone();
            for _ in 0..1 + random.below(2) {
                changed = changed.changed(random);
            }
            self.make(&changed, version, target, contents);
        }
    }

    fn end(self, least: usize) {
        pages::running("");
        println!("{} launches", self.launched);
        assert!(self.launched >= least, "{} launches", self.launched);
        drop(self.pages);
        self.places.into_iter().for_each(Place::end);
    }
}

#[test]
fn lints_that_stay_within_the_tensors_do() {
    alone("flash_family::guarded::lints_that_stay_within_the_tensors_do", || {
        let mut caller = Caller::new();
        let mut tried = std::collections::BTreeSet::new();
        lints::each_broken(&mut |id, call, version, target| {
            let rule = rules::lints::all().find(|rule| rule.id == id).unwrap();
            let small = |desc: &TensorDesc| desc.byte_range().is_none_or(|of| of.end <= Pages::REGION as u64);
            if rule.overruns || !call.each_tensor().all(|(_, desc)| small(desc)) {
                return;
            }
            tried.insert(id);
            let target = Target::with_default(target.soc, target.cann);
            let version = version.min(Version::newest_of(target.cann));
            let arguments = call.to_arguments();
            caller.make(&arguments, version.number(), target, &draws::fill);
        });
        // Some end before a launch.
        let lints = rules::lints::all().filter(|rule| !rule.overruns);
        let left: Vec<_> = lints.map(|rule| rule.id).filter(|id| !tried.contains(id)).collect();
        assert_eq!(left, ["portable.refused", "portable.meaning"]);
        caller.end(tried.len());
    });
}

#[test]
fn launches_of_inference_attention_stay_within_their_tensors() {
    alone("flash_family::guarded::launches_of_inference_attention_stay_within_their_tensors", || {
        let mut caller = Caller::new();
        let random = &mut Random(11);
        for seed in 0..draws::FUSED_SEEDS {
            let call = draws::fused(seed);
            let described = call.describe().to_arguments();
            let contents = |name: &'static str, index, desc: &TensorDesc, held: &mut [u8]| {
                let made = call.contents.iter().find(|(of, _)| (of.name(), of.index) == (name, index));
                match made {
                    Some((_, bytes)) if bytes.len() >= held.len() => held.copy_from_slice(&bytes[..held.len()]),
                    _ => draws::fill(name, index, desc, held),
                }
            };
            let target = Target::with_default(call.target.soc, call.target.cann);
            let newest = Version::newest_of(target.cann);
            let own = call.version.min(newest);
            let version = if one_in(3, random) { newest } else { own };
            let fused = (&described, version.number(), target);
            caller.make_changed(fused, &contents, 5, random);
            let prompt = (&draws::prompt(seed), 1 + (seed % 3) as u8, draws::NEWEST);
            caller.make_changed(prompt, &draws::fill, 2, random);
            let incre = (&draws::incre(seed), 1 + (seed % 4) as u8, draws::NEWEST);
            caller.make_changed(incre, &draws::fill, 2, random);
        }
        caller.end(500);
    });
}

#[test]
fn launches_of_the_other_operators_stay_within_their_tensors() {
    alone("flash_family::guarded::launches_of_the_other_operators_stay_within_their_tensors", || {
        let mut caller = Caller::new();
        let random = &mut Random(12);
        let target = draws::NEWEST;
        for seed in 0..draws::OTHER_SEEDS {
            let fill = &draws::fill;
            let (score, version) = draws::score(seed);
            caller.make_changed((&score, version, target), fill, 4, random);
            let (ring, version) = draws::ring(seed);
            caller.make_changed((&ring, version, target), fill, 3, random);
            caller.make_changed((&draws::gather(seed), 1, target), fill, 3, random);
            caller.make_changed((&draws::scatter(seed), 1, target), fill, 3, random);
            caller.make_changed((&draws::update(seed), 1, target), fill, 3, random);
            caller.make_changed((&draws::products(seed), 1, target), fill, 3, random);
        }
        caller.end(1000);
    });
}

#[test]
fn a_drop_mask_may_begin_behind_its_base_address() {
    let mut caller = Caller::new();
    let (mut score, version) = draws::score(0);
    let bits = 1 << 20;
    let mask = TensorDesc::contiguous(ascend_spec::DType::UInt8, &[bits]).unwrap();
    score.drop_mask = Some(TensorDesc { offset: 48, ..mask });
    score.keep_prob = 0.5;
    caller.make(&score, version, draws::NEWEST, &draws::fill);
    caller.end(2);
}

/// A shared prefix beside packed rows over a cache: the split-fuse path, which ignores it, and whose cache has rows of
/// all heads where the prefix has rows of one.
#[test]
fn an_ignored_prefix_is_not_read() {
    let mut caller = Caller::new();
    let half = |shape: &[i64]| TensorDesc::contiguous(ascend_spec::DType::Float16, shape);
    let cache = half(&[4, 16, 320]).unwrap();
    let call = fia::Arguments {
        query: half(&[1, 4, 80]),
        key: vec![cache],
        value: vec![cache],
        block_table: TensorDesc::contiguous(ascend_spec::DType::Int32, &[1, 3]),
        block_size: 16,
        key_shared_prefix: half(&[1, 4, 80]),
        value_shared_prefix: half(&[1, 4, 80]),
        actual_seq_lengths: Some(vec![1]),
        actual_seq_lengths_kv: Some(vec![37]),
        num_heads: 4,
        num_key_value_heads: 4,
        input_layout: "TND".into(),
        inner_precise: 0,
        attention_out: half(&[1, 4, 80]),
        ..fia::Arguments::default()
    };
    caller.make(&call, 5, draws::NEWEST, &draws::fill);
    caller.end(2);
}
