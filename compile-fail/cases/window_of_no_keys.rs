//! A window that shows nothing, which some engines take for no window.

use ascend_serving::Causality;

fn main() {
    let _ = Causality::Window(0);
}
