//! The factor of the scores.

/// The factor of the scores as operators hold it: in 32 bits, in which numbers from about `3.4e38` on are infinite, and
/// those below about `1e-45` are 0.
pub fn score_scale(given: f64) -> f32 {
    given as f32
}

/// The factor that was likely meant where the square root of a head dimension is given instead of its reciprocal.
/// Head dimensions of 1 are not considered.
pub fn inverted_scale(given: f64, head_dims: impl IntoIterator<Item = usize>) -> Option<f64> {
    let roots = head_dims
        .into_iter()
        .filter(|&dim| dim > 1)
        .map(|dim| (dim as f64).sqrt());
    let mut near = roots.filter(|root| (given / root - 1.0).abs() < 1e-3);
    near.next().map(f64::recip)
}

#[cfg(test)]
mod tests {
    use super::inverted_scale;

    #[test]
    fn roots_are_told_from_factors() {
        let meant = |given| inverted_scale(given, [64, 128]);
        assert_eq!(meant(8.0), Some(0.125));
        assert!(meant(11.3137).is_some_and(|meant| (meant - 0.088_388).abs() < 1e-6));
        for given in [
            0.125,
            1.0,
            0.0,
            -8.0,
            8.1,
            11.0,
            64.0,
            f64::NAN,
            f64::INFINITY,
        ] {
            assert_eq!(meant(given), None, "{given}");
        }
        assert_eq!(inverted_scale(1.0, [1, 0]), None);
    }
}
