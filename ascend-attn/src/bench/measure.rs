//! The time of a call, compared with the machine's own peak at that moment.

use super::cases::{Case, Ready};
use ascend_attention::spec::DType;
use ascend_emu::kernel::roofline;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Least number of runs.
const RUNS: usize = 5;

/// The runs are repeated until this time has passed.
const ENOUGH: Duration = Duration::from_millis(800);

/// Largest number of runs.
const MOST_RUNS: usize = 40;

/// Thousands of operations in one burst of arithmetic, which takes some milliseconds.
const BURST: u64 = 300_000;

/// Number of floats by which memory is measured, more than caches hold.
const MEMORY: usize = 96 << 20;

/// Threads, and memory to measure their bandwidth with.
#[derive(Debug)]
pub(crate) struct Bench {
    pool: ThreadPool,
    threads: usize,
    memory: Vec<f32>,
}

/// The measurements of one case.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Measured {
    /// Median time of the runs.
    pub(crate) seconds: f64,
    /// Billions of operations a second, by the median time.
    pub(crate) gflops: f64,
    /// Time at the roof divided by the measured time: the roof is the slower of all operations at the measured peak
    /// and all bytes at the measured rate of reading, both taken right before and after each run. Median of the runs.
    pub(crate) fraction_of_peak: f64,
    pub(crate) bytes_per_second: f64,
    /// Whether the roof is the memory's.
    pub(crate) memory_bound: bool,
    pub(crate) peak_gflops: f64,
    pub(crate) read_bytes_per_second: f64,
    pub(crate) copy_bytes_per_second: f64,
    pub(crate) runs: usize,
    /// Number of bytes that a run uses besides its tensors.
    pub(crate) scratch_bytes: usize,
}

impl Bench {
    pub(crate) fn new(threads: usize) -> Result<Self, String> {
        let pool = ThreadPoolBuilder::new().num_threads(threads).build().map_err(|error| error.to_string())?;
        Ok(Self { pool, threads, memory: vec![1.0; MEMORY] })
    }

    /// Operations a second, all threads at once.
    fn peak(&self) -> f64 {
        self.rate(|_| roofline::multiply_add(BURST) as f64)
    }

    /// Bytes read a second, all threads at once.
    fn read(&self) -> f64 {
        let part = self.memory.len() / self.threads;
        self.rate(|thread| {
            let first = thread * part;
            black_box(roofline::read(&self.memory[first..first + part]));
            (part * size_of::<f32>()) as f64
        })
    }

    /// The work of all threads in a second, as the sum of each thread's own rate. If the time were measured until the
    /// last thread is done, one slow thread would lower the rate of all; in a call the work goes to the threads that
    /// are free.
    fn rate(&self, work: impl Fn(usize) -> f64 + Sync) -> f64 {
        let rates = self.pool.broadcast(|at| {
            let start = Instant::now();
            let done = work(at.index());
            done / start.elapsed().as_secs_f64()
        });
        rates.iter().sum()
    }

    /// Bytes copied a second, all threads at once; each counts once, though it is read and written.
    fn copy(&mut self) -> f64 {
        let (from, to) = self.memory.split_at_mut(MEMORY / 2);
        let part = from.len().div_ceil(self.threads);
        let start = Instant::now();
        self.pool.scope(|scope| {
            for (from, to) in from.chunks(part).zip(to.chunks_mut(part)) {
                scope.spawn(move |_| to.copy_from_slice(from));
            }
        });
        (size_of::<f32>() * MEMORY / 2) as f64 / start.elapsed().as_secs_f64()
    }

    /// Measures one case.
    pub(crate) fn measure(&mut self, case: &Case, held: DType, ready: &mut Ready<'_>) -> Result<Measured, String> {
        let (flops, bytes) = (case.flops(), case.bytes(held));
        let copy = self.copy();
        let (mut peak, mut read) = (self.peak(), self.read());
        let memory_bound = bytes / read > flops / peak;
        let run = |ready: &mut Ready<'_>| {
            let start = Instant::now();
            self.pool.install(|| ready.run())?;
            Ok::<f64, String>(start.elapsed().as_secs_f64())
        };
        // The first run also touches the memory for the first time.
        run(ready)?;
        let (mut seconds, mut fractions) = (Vec::new(), Vec::new());
        let (mut peaks, mut reads) = (Vec::new(), Vec::new());
        let begin = Instant::now();
        while seconds.len() < RUNS || begin.elapsed() < ENOUGH && seconds.len() < MOST_RUNS {
            if memory_bound {
                read = self.read();
            } else {
                peak = self.peak();
            }
            let taken = run(ready)?;
            if memory_bound {
                read = (read + self.read()) / 2.0;
            } else {
                peak = (peak + self.peak()) / 2.0;
            }
            seconds.push(taken);
            fractions.push((flops / peak).max(bytes / read) / taken);
            peaks.push(peak);
            reads.push(read);
        }
        let runs = seconds.len();
        let median_seconds = median(&mut seconds);
        Ok(Measured {
            seconds: median_seconds,
            gflops: flops / median_seconds / 1e9,
            fraction_of_peak: median(&mut fractions),
            bytes_per_second: bytes / median_seconds,
            memory_bound,
            peak_gflops: median(&mut peaks) / 1e9,
            read_bytes_per_second: median(&mut reads),
            copy_bytes_per_second: copy,
            runs,
            scratch_bytes: ready.working_memory(),
        })
    }
}

/// The middle value, or the mean of the two in the middle.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let at = |index: usize| values.get(index).copied().unwrap_or(f64::NAN);
    let count = values.len();
    (at(count.saturating_sub(1) / 2) + at(count / 2)) / 2.0
}
