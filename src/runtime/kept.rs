//! Values that other modules keep with a device.

use std::any::Any;
use std::sync::OnceLock;

/// One value of each type, made at the first call for the type.
#[derive(Default)]
pub(super) struct Kept(OnceLock<Box<Entry>>);

struct Entry {
    value: Box<dyn Any + Send + Sync>,
    next: Kept,
}

impl Kept {
    /// The value of a type.
    pub(super) fn of<T: Any + Send + Sync + Default>(&self) -> &T {
        let mut at = self;
        loop {
            let entry = at.0.get_or_init(|| {
                Box::new(Entry {
                    value: Box::new(T::default()),
                    next: Kept::default(),
                })
            });
            match entry.value.downcast_ref() {
                Some(value) => return value,
                None => at = &entry.next,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn each_type_has_one_value() {
        let kept = Kept::default();
        *kept.of::<Mutex<u8>>().lock().unwrap() = 1;
        *kept.of::<Mutex<String>>().lock().unwrap() = "two".to_owned();
        assert_eq!(*kept.of::<Mutex<u8>>().lock().unwrap(), 1);
        assert_eq!(*kept.of::<Mutex<String>>().lock().unwrap(), "two");
    }
}
