// The Python binding of products: `PackedWeight` (packed_weight.h), the queue that fills it and the screen of a head
// (head_screen.h). See module.cpp.
#include "head_screen.h"
#include "loading.h"
#include "module.h"
#include "packed_weight.h"

#include <nanobind/nanobind.h>

namespace octavo {

void bind_weights(nb::module_& m) {
  nb::class_<PackedWeight>(m, "PackedWeight")
      .def(nb::init<int, int64_t, int64_t>())
      .def(nb::init<int, int, int64_t, int64_t, int64_t>())
      .def("pack", &PackedWeight::pack)
      .def("pack_codes", &PackedWeight::pack_codes)
      .def("run", &PackedWeight::run)
      .def("argmax", &PackedWeight::argmax)
      .def("rows", &PackedWeight::rows)
      .def_prop_ro("bytes", &PackedWeight::bytes);
  nb::class_<HeadScreen>(m, "HeadScreen")
      .def(nb::init<const PackedWeight&, uintptr_t>(), nb::keep_alive<1, 2>())
      .def("argmax", &HeadScreen::argmax)
      .def_prop_ro("usable", &HeadScreen::usable)
      .def_prop_ro("bytes", &HeadScreen::bytes);
  m.def("can_load", [](int kind, int64_t k) {
    const StoredType stored = stored_type(kind);
    return stored.block != 0 && k % stored.block == 0;
  });
  m.def("adopt_room", [](uintptr_t at, size_t bytes) { room().adopt(reinterpret_cast<char*>(at), bytes); });
  m.def("leave_room", [] { room().leave(); });
  nb::class_<LoadQueue>(m, "LoadQueue")
      .def(nb::init<>())
      .def("add",
           [](LoadQueue& q, const PackedWeight& weight, uintptr_t source, int kind, int64_t first, int64_t count,
              bool release) { q.add(weight.load_args(source, kind, first, count), release); })
      .def("run", [](LoadQueue& q, bool threaded, double share) { q.run(*kernels, threaded, share); },
           nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("finite", &LoadQueue::finite)
      .def_prop_ro("done", &LoadQueue::done)
      .def_prop_ro("total", &LoadQueue::total);
}

}  // namespace octavo
