// Which directive is being run, for the profile: libgomp leaves source file and line out of what it
// tells a profiler, so a nest notes them itself, in the line above its directive.
#pragma once

namespace cnn_engine::openacc {

struct Site {
  const char* file = "";
  const char* function = "";
  int line = 0;
};

Site& current_site();  // of the calling thread

class SiteScope {
 public:
  SiteScope(const char* file, const char* function, int line) : before_(current_site()) {
    current_site() = {file, function, line};
  }
  ~SiteScope() { current_site() = before_; }
  SiteScope(const SiteScope&) = delete;
  SiteScope& operator=(const SiteScope&) = delete;

 private:
  Site before_;
};

}  // namespace cnn_engine::openacc

#define CNN_ENGINE_ACC_SITE \
  const ::cnn_engine::openacc::SiteScope site_scope(__FILE__, __func__, __LINE__ + 1)
