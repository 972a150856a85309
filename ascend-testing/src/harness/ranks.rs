//! Ranks on devices of one process.

use std::sync::Once;
use std::thread;

use ascend_attention::Device;
use ascend_attention::comm::Communicator;

use super::runtime;

/// The most ranks that tests have.
pub const MOST_RANKS: usize = 8;

/// A device of the platform, of which the emulation has one for each rank. Tests of programs with several devices begin
/// here.
pub fn device_of_rank(rank: usize) -> Device {
    static DEVICES: Once = Once::new();
    // SAFETY: every test of such a program begins here, and no other thread of it reads the environment before.
    DEVICES.call_once(|| unsafe { std::env::set_var("ASCEND_EMU_DEVICES", MOST_RANKS.to_string()) });
    runtime().device(rank as i32).unwrap()
}

/// Runs `body` as each rank of a communicator, on a thread of its own, and returns the results by rank.
pub fn as_ranks<R: Send>(size: usize, body: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
    let devices: Vec<Device> = (0..size).map(device_of_rank).collect();
    let ranks = Communicator::all(&devices).unwrap();
    thread::scope(|scope| {
        let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(|| body(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
