//! Numbers, most of them small or absurd.

use ascend_attention::spec::geometry::{TriangleMix, TrianglePart, TriangleRows};

/// Draws numbers from a seed.
pub struct Draw(u64);

const ABSURD: [u64; 14] = [
    u64::MAX,
    u64::MAX - 1,
    1 << 63,
    (1 << 63) - 1,
    1 << 58,
    1 << 40,
    (1 << 32) + 1,
    (1 << 32) - 1,
    (1 << 31) - 1,
    1 << 31,
    1 << 30,
    1 << 20,
    65_537,
    4097,
];

impl Draw {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        (self.bits() >> 33) as usize % end.max(1)
    }

    pub fn u64(&mut self) -> u64 {
        match self.below(8) {
            0..4 => self.below(5) as u64,
            4 => [16, 64, 100, 128, 255, 256, 1000][self.below(7)],
            5 | 6 => ABSURD[self.below(ABSURD.len())],
            _ => self.bits(),
        }
    }

    pub fn i64(&mut self) -> i64 {
        match self.below(4) {
            0 => (self.u64() as i64).wrapping_neg(),
            _ => self.u64() as i64,
        }
    }

    pub fn usize(&mut self) -> usize {
        self.u64() as usize
    }

    /// Absurd ones are those of 32 bits.
    pub fn u32(&mut self) -> u32 {
        let number = self.u64();
        u32::try_from(number).unwrap_or((number >> 32) as u32 | number as u32)
    }

    pub fn i32(&mut self) -> i32 {
        match self.below(5) {
            0 => i32::MIN,
            1 => -1,
            _ => self.u32() as i32,
        }
    }

    pub fn bool(&mut self) -> bool {
        self.below(2) == 0
    }

    pub fn f64(&mut self) -> f64 {
        [0.0, 1.0, -1.0, f64::NAN, f64::INFINITY, f64::MAX, 1e-300][self.below(7)]
    }

    /// Up to three of something.
    pub fn few<T>(&mut self, mut one: impl FnMut(&mut Self) -> T) -> Vec<T> {
        (0..self.below(4)).map(|_| one(self)).collect()
    }

    /// Sizes, a part and rows of TriangleMix.
    pub fn triangle(&mut self) -> (TriangleMix, TrianglePart, TriangleRows) {
        let sizes = TriangleMix::new(self.u64(), self.u64(), self.u64());
        let rows = match self.bool() {
            true => TriangleRows::whole(self.u64()),
            false => TriangleRows { first_row: self.u64(), rows: self.u64(), prompt_len: self.u64() },
        };
        (sizes, self.of(&TrianglePart::ALL), rows)
    }

    pub fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }
}
