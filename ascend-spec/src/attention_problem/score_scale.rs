//! The factor of the scores.

/// The factor of the scores as operators hold it: in 32 bits, in which numbers from about `3.4e38` on are infinite, and
/// those below about `1e-45` are 0.
pub fn score_scale(given: f64) -> f32 {
    given as f32
}
