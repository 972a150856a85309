//! The precisions of a sample.

/// A type that [`LayerSample`](crate::LayerSample) holds: `f32` or `f64`. Sums over tokens are in double precision in
/// either.
pub trait SampleReal: Copy + Send + Sync + sealed::Sealed {
    /// The dot product of two vectors, in this precision.
    fn dot(a: &[Self], b: &[Self]) -> f64;
    /// Whether it is a finite number.
    fn is_finite(self) -> bool;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}

macro_rules! sample_reals {
    ($($real:ty),*) => {$(
        impl SampleReal for $real {
            fn dot(a: &[Self], b: &[Self]) -> f64 {
                // Several sums side by side, which the compiler computes at once.
                const LANES: usize = 8;
                let mut lanes = [0.0; LANES];
                let (a, b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
                let rest = a.remainder().iter().zip(b.remainder());
                let rest: $real = rest.map(|(x, y)| x * y).sum();
                for (x, y) in a.zip(b) {
                    for ((lane, x), y) in lanes.iter_mut().zip(x).zip(y) {
                        *lane += x * y;
                    }
                }
                f64::from(lanes.iter().sum::<$real>() + rest)
            }

            fn is_finite(self) -> bool {
                <$real>::is_finite(self)
            }
        }
    )*};
}

sample_reals!(f32, f64);
