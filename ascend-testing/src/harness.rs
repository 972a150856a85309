//! What the tests share: the platform, data, and an attention of their own.
//!
//! `ASCEND_TEST_PLATFORM=npu` runs the same tests through the dynamic loader: on hardware, or on the emulator laid out
//! as a toolkit. A test that means nothing there says so by [`not_on_npu`]; the last line of the program counts them,
//! and tells whether the toolkit was loaded.

pub mod gate;
pub mod ranks;
pub mod reference;

use approx::abs_diff_eq;
use std::io::Write;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, OnceLock};

use ascend_attention::spec::{Cann, Soc, Target};
use ascend_attention::sys::{Api, Functions};
use ascend_attention::{
    CausalOrigin, Device, Element, Error, FusedInferAttention, InnerPrecise, Layout, Machine, Mask, Output, Plan,
    Runtime, Stream, Tensor, f16,
};

/// Whether the tests run on an NPU.
pub fn on_npu() -> bool {
    match std::env::var("ASCEND_TEST_PLATFORM").as_deref() {
        Ok("npu") => true,
        Err(_) | Ok("emulated" | "") => false,
        Ok(other) => panic!("ASCEND_TEST_PLATFORM={other}: npu or emulated"),
    }
}

/// Whether a test ends here because it needs the emulation in its own process. Says so, and counts it.
#[must_use]
pub fn not_on_npu(why: &str) -> bool {
    if on_npu() {
        does_not_apply(why);
    }
    on_npu()
}

/// Says that a test, or the rest of it, does not apply here, and counts it.
pub fn does_not_apply(why: &str) {
    tally::begin();
    tally::WITHOUT.fetch_add(1, Ordering::Relaxed);
    let thread = std::thread::current();
    // Past the capture of `print`: a test that passes without having run must be seen.
    let _ = writeln!(std::io::stderr(), "does not apply: {}: {why}", thread.name().unwrap_or("?"));
}

/// Tests of this program give sparse attention lists that name blocks twice, or that are not read to their ends, and
/// masks of blocks whose rows see nothing or whose bytes are neither 0 nor 1: such findings of the emulation are
/// expected.
pub fn expect_odd_sparse_lists() {
    #[cfg(feature = "emulation")]
    watch::ODD_LISTS.store(true, Ordering::Relaxed);
}

/// The runtime under test.
pub fn runtime() -> Runtime {
    if on_npu() {
        let runtime = Runtime::npu().unwrap();
        tally::begin();
        tally::LOADED.store(true, Ordering::Relaxed);
        return runtime;
    }
    #[cfg(feature = "emulation")]
    watch::begin();
    Runtime::emulated().unwrap()
}

macro_rules! filled {
    ($( [$library:ident] fn $name:ident ( $( $argument:ident : $type:ty ),* ) -> $result:ty ; )*) => {
        /// The functions that `api` has.
        fn table_of(api: &Api) -> Functions {
            Functions { $( $name: api.$name().ok(), )* }
        }
    };
}

ascend_attention::sys::for_each_function! { filled }

/// The functions of the platform under test, for tests that put some of their own in place of some.
pub fn functions() -> Functions {
    static TABLE: OnceLock<Functions> = OnceLock::new();
    let fill = || {
        let runtime = runtime();
        let table = table_of(runtime.api());
        // The functions are called when this runtime is gone.
        std::mem::forget(runtime);
        table
    };
    if on_npu() {
        return TABLE.get_or_init(fill).clone();
    }
    #[cfg(feature = "emulation")]
    {
        watch::begin();
        ascend_emu::functions()
    }
    #[cfg(not(feature = "emulation"))]
    TABLE.get_or_init(fill).clone()
}

pub fn device() -> Device {
    runtime().device(0).unwrap()
}

pub fn stream() -> Stream {
    device().stream().unwrap()
}

/// An Atlas A2 with a release, for what that release alone does; none, said so, on an NPU that is another. 8.1 is the
/// snapshot, which has V4.
#[must_use]
fn runtime_of(cann: Cann) -> Option<Runtime> {
    let target = Target::new(Soc::AtlasA2, cann);
    if on_npu() {
        let own = device().target().unwrap();
        if own == target {
            return Some(runtime());
        }
        does_not_apply(&format!("it is about {target}, this is {own}"));
        return None;
    }
    #[cfg(feature = "emulation")]
    {
        watch::begin();
        use ascend_attention::spec::ops::fused_infer_attention_score::Version;
        let newest = Version::newest_of(cann).max(Version::V4);
        let machine = ascend_attention::Machine::new(Soc::AtlasA2, cann).operator(newest);
        Some(Runtime::emulated_as(&machine).unwrap())
    }
    #[cfg(not(feature = "emulation"))]
    None
}

/// A stream of [`runtime_of`].
#[must_use]
pub fn stream_of(cann: Cann) -> Option<Stream> {
    let runtime = runtime_of(cann)?;
    Some(runtime.device(0).unwrap().stream().unwrap())
}

/// A stream of an emulated product with a release.
#[must_use]
pub fn emulated_stream(soc: Soc, cann: Cann) -> Stream {
    let runtime = Runtime::emulated_as(&Machine::new(soc, cann)).unwrap();
    runtime.device(0).unwrap().stream().unwrap()
}

/// The functions of [`runtime_of`].
#[must_use]
pub fn functions_of(cann: Cann) -> Option<Functions> {
    static RUNTIMES: Mutex<Vec<Runtime>> = Mutex::new(Vec::new());
    let runtime = runtime_of(cann)?;
    let table = table_of(runtime.api());
    // The functions are called when this runtime would be gone.
    RUNTIMES.lock().unwrap().push(runtime);
    Some(table)
}

/// A small call that takes a while to compute, and its answer by the definition: BNSD, causal, f16.
pub struct Sample {
    pub query: Vec<f16>,
    pub key: Vec<f16>,
    pub value: Vec<f16>,
    pub want: Vec<f64>,
}

impl Sample {
    pub const SHAPE: [usize; 4] = [1, 2, 96, 64];
    pub const LEN: usize = 2 * 96 * 64;
    pub const SCALE: f64 = 0.125;

    pub fn new(seed: u64) -> Self {
        let [_, heads, rows, _] = Self::SHAPE;
        let random = |salt| reference::Logical::random(3 * seed + salt, Self::SHAPE);
        let (query, key, value) = (random(1), random(2), random(3));
        let (q, k, v) = (query.exact(), key.exact(), value.exact());
        let mut want = Vec::new();
        for head in 0..heads {
            for i in 0..rows {
                let row = reference::row(&q, &k, &v, (0, 0), head, i, Self::SCALE, |j| j <= i);
                want.extend(row.unwrap().0);
            }
        }
        Self { query: query.data, key: key.data, value: value.data, want }
    }

    /// The call, for tensors of this shape.
    pub fn attention(device: &Device) -> FusedInferAttention {
        FusedInferAttention::new(Layout::Bnsd)
            .heads(Self::SHAPE[1])
            .scale(Self::SCALE)
            .mask(device.masks().causal(CausalOrigin::RightDown).unwrap())
    }

    pub fn upload(&self, stream: &Stream) -> [Tensor<f16>; 3] {
        [&self.query, &self.key, &self.value].map(|data| stream.upload(data, Self::SHAPE).unwrap())
    }

    #[track_caller]
    pub fn check(&self, got: &[f16]) {
        assert_eq!(got.len(), self.want.len());
        for (i, (got, want)) in got.iter().zip(&self.want).enumerate() {
            let got = got.to_f64();
            assert!(abs_diff_eq!(got, want, epsilon = 1.5e-3), "element {i}: {got}, expected {want}");
        }
    }
}

/// Outputs full of NaN: a launch that writes nothing fails.
pub fn poisoned<T: reference::Half>(plan: &Plan, stream: &Stream) -> Output<T> {
    let output = plan.output::<T>().unwrap();
    output.attention.overwrite(stream, &vec![T::NAN; output.attention.len()]).unwrap();
    if let Some(lse) = &output.softmax_lse {
        lse.overwrite(stream, &vec![f32::NAN; lse.len()]).unwrap();
    }
    output
}

/// Attention of two heads over f16 inputs under a mask, on the device and by the definition.
#[track_caller]
pub fn attends(
    stream: &Stream,
    (rows, keys): (usize, usize),
    mask: Mask,
    visible: impl Fn(usize, usize) -> bool,
) -> Vec<f16> {
    let random = |seed, rows| reference::Logical::<f16>::random(seed, [1, 2, rows, 16]);
    let inputs = [random(1, rows), random(2, keys), random(3, keys)];
    let [query, key, value] = inputs.each_ref().map(|rows| stream.upload(&rows.data, [1, 2, rows.rows, 16]).unwrap());
    let mask_bytes = mask.tensor_bytes();
    let plan = FusedInferAttention::new(Layout::Bnsd)
        .heads(2)
        .scale(0.25)
        .mask(mask)
        .inner_precise(InnerPrecise::HighPrecisionCorrected)
        .plan((&query, &key, &value))
        .unwrap();
    assert_eq!(plan.mask_bytes(), mask_bytes);
    let mut output = poisoned(&plan, stream);
    plan.launch_into(stream, (&query, &key, &value), &mut output).unwrap();
    let got = output.attention.download(stream).unwrap();
    let [q, k, v] = inputs.each_ref().map(reference::Logical::exact);
    for head in 0..2 {
        for i in 0..rows {
            let want = reference::row(&q, &k, &v, (0, 0), head, i, 0.25, |j| visible(i, j));
            let want = want.map_or_else(|| vec![0.0; 16], |(out, _)| out);
            let got = &got[(head * rows + i) * 16..][..16];
            for (got, want) in got.iter().zip(want) {
                assert!(abs_diff_eq!(got.to_f64(), want, epsilon = 2e-3), "head {head}, row {i}: {got}, not {want}");
            }
        }
    }
    got
}

/// The device still computes.
#[track_caller]
pub fn still_works(stream: &Stream) {
    let sample = Sample::new(42);
    let [query, key, value] = sample.upload(stream);
    let plan = Sample::attention(stream.device()).plan((&query, &key, &value)).unwrap();
    let mut output = poisoned(&plan, stream);
    plan.launch_into(stream, (&query, &key, &value), &mut output).unwrap();
    sample.check(&output.attention.download(stream).unwrap());
}

pub fn tensor(stream: &Stream, shape: [usize; 4]) -> Tensor<f16> {
    stream.upload(&halves(1, shape.iter().product()), shape).unwrap()
}

/// `n` numbers between -1 and 1, the same for each seed.
pub fn numbers(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

pub fn halves(seed: u64, n: usize) -> Vec<f16> {
    numbers(seed, n).into_iter().map(f16::from_f32).collect()
}

/// The last line on an NPU.
mod tally {
    use std::sync::Once;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    /// Tests that did not apply.
    pub(super) static WITHOUT: AtomicUsize = AtomicUsize::new(0);
    /// Whether the libraries of a toolkit were opened.
    pub(super) static LOADED: AtomicBool = AtomicBool::new(false);

    static BEGIN: Once = Once::new();

    pub(super) fn begin() {
        BEGIN.call_once(|| {
            // SAFETY: `tell` is a function of this program and takes nothing from threads that may be gone.
            assert_eq!(unsafe { libc::atexit(tell) }, 0);
        });
    }

    extern "C" fn tell() {
        let loaded = if LOADED.load(Ordering::Relaxed) { "loaded" } else { "not loaded" };
        let without = WITHOUT.load(Ordering::Relaxed);
        eprintln!("toolkit {loaded}, {without} tests did not apply");
    }
}

/// On emulation, everything has to be given back when the tests are over, and no misuse may have been found.
#[cfg(feature = "emulation")]
mod watch {
    use std::sync::Once;
    use std::sync::atomic::{AtomicBool, Ordering};

    use ascend_emu::FindingKind;

    static BEGIN: Once = Once::new();
    pub(super) static ODD_LISTS: AtomicBool = AtomicBool::new(false);

    /// The first test that fails says how the emulation looked at what it did.
    fn tell_mode_of_first_failure() {
        static TOLD: Once = Once::new();
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            before(panic);
            TOLD.call_once(|| {
                let mode = ascend_emu::check();
                eprintln!(
                    "checked in the mode {mode} (ASCEND_EMU_CHECK): {}",
                    match mode {
                        ascend_emu::Check::Compat =>
                            "races and other misuse pass with a warning, strict makes errors of them",
                        _ => "races and other misuse are errors",
                    }
                );
            });
        }));
    }

    pub(super) fn begin() {
        BEGIN.call_once(|| {
            tell_mode_of_first_failure();
            // SAFETY: `check` is a function of this program and takes nothing from threads that may be gone.
            assert_eq!(unsafe { libc::atexit(check) }, 0);
        });
    }

    extern "C" fn check() {
        let live = ascend_emu::live();
        let mut findings = ascend_emu::findings();
        if ODD_LISTS.load(Ordering::Relaxed) {
            let odd =
                [FindingKind::RepeatedBlock, FindingKind::SkippedEntry, FindingKind::HiddenRow, FindingKind::MaskByte];
            findings.retain(|finding| !odd.contains(&finding.kind));
        }
        if live.is_empty() && findings.is_empty() {
            return;
        }
        eprintln!("not given back: {live:#?}\nfound: {findings:#?}");
        // SAFETY: ends the process.
        unsafe { libc::_exit(101) };
    }
}

/// A tensor of this shape whose elements are all `value`.
pub fn filled<T: Element>(stream: &Stream, value: T, shape: impl AsRef<[usize]>) -> Tensor<T> {
    let elements = vec![value; shape.as_ref().iter().product()];
    stream.upload(&elements, shape).unwrap()
}

/// The id of the rule that a call is refused by.
#[track_caller]
pub fn violated<T>(outcome: Result<T, Error>) -> &'static str {
    match outcome {
        Err(Error::Violation(violation)) => violation.rule.id,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("accepted"),
    }
}
